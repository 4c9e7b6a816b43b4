"""Cross-entropy of a linear head that never holds the logits of all tokens at once.

    loss = sum_i [ logsumexp(W x_i) - (W x_i)_{y_i} ]  over tokens i whose label y_i is not ignored
    dx_i = W^T (softmax(W x_i) - onehot(y_i)),  dW = sum_i (softmax(W x_i) - onehot(y_i)) x_i^T

With label smoothing e, (1 - e) onehot(y_i) + e / w stands in place of onehot(y_i).

The gradients are computed beside the loss, some tokens at a time, while their logits are at hand:
with 32,100 words a single sequence of 2,048 would need 250 MiB for them, and as much again for
their gradient. Backward then only scales what forward found.

Axes: n tokens, d width, w words.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from leap.ops.derivatives import differentiable_again, gradients, transformed

IGNORED = -100
TOKENS_AT_ONCE = 256


def linear_cross_entropy(
    x: Float[Tensor, "n d"],
    weight: Float[Tensor, "w d"],
    labels: Int[Tensor, " n"],
    bias: Float[Tensor, " w"] | None = None,
    smoothing: float = 0.0,
) -> Float[Tensor, ""]:
    """The summed cross-entropy of `x @ weight.T + bias` against the labels, in float32.

    Args:
        x: hidden states.
        weight, bias: of the head.
        labels: the word that each token should predict, or -100 to leave it out.
        smoothing: share of the label that is spread over all words.
    """
    if transformed():
        return plain_cross_entropy(x, weight, bias, labels, smoothing)[0]
    loss: Tensor = _LinearCrossEntropy.apply(x, weight, bias, labels, smoothing)
    return loss


def plain_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float
) -> tuple[Tensor]:
    """The same by operations of torch alone, which hold all logits."""
    return (_of_logits(F.linear(x, weight, bias), labels, smoothing),)


def head_cross_entropy(
    x: Float[Tensor, "n d"],
    head: nn.Module,
    labels: Int[Tensor, " n"],
    smoothing: float = 0.0,
) -> Float[Tensor, ""]:
    """The summed cross-entropy of `head(x)` against the labels, in float32.

    A linear layer as torch has it is never called: see `linear_cross_entropy`. Any other head is
    called once, as adapters, quantised and sharded weights ask for, and all its logits are held.
    """
    if is_plain(head, nn.Linear):
        assert isinstance(head, nn.Linear)
        return linear_cross_entropy(x, head.weight, labels, head.bias, smoothing)
    return _of_logits(head(x), labels, smoothing)


def _of_logits(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    return F.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)),
        labels,
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=smoothing,
    )


def is_plain(module: nn.Module, kind: type[nn.Linear] | type[nn.Embedding]) -> bool:
    """Whether calling the module does what torch's own does, so that its weights say it all."""
    # FSDP2, parametrisations, adapters and quantisation change the class of the layer or of its
    # weight; accelerate exchanges `forward`; the rest come as hooks.
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return (
        type(module) is kind
        and isinstance(module, nn.Linear | nn.Embedding)
        and type(module.weight) in (Tensor, nn.Parameter)
        and module.weight.is_floating_point()
        and "forward" not in vars(module)
        and not any(getattr(module, name) for name in hooks)
    )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, labels, smoothing):  # type: ignore[no-untyped-def]
        wants = ctx.needs_input_grad[:3]
        total = torch.promote_types(x.dtype, torch.float32)
        loss = x.new_zeros((), dtype=total)
        dx = torch.empty_like(x) if wants[0] else None
        dweight = torch.zeros_like(weight, dtype=total) if wants[1] else None
        dbias = torch.zeros_like(bias, dtype=total) if bias is not None and wants[2] else None
        for start in range(0, len(x), TOKENS_AT_ONCE):
            part = slice(start, start + TOKENS_AT_ONCE)
            logits = F.linear(x[part], weight, bias).to(total)
            counted = labels[part] != IGNORED
            target = labels[part].where(counted, 0).unsqueeze(-1)
            scale = counted.unsqueeze(-1).to(total)
            largest = logits.amax(dim=-1, keepdim=True)
            hit = logits.gather(-1, target)
            if smoothing:
                hit = hit + smoothing * (logits.mean(dim=-1, keepdim=True) - hit)
            likelihood = logits.sub_(largest).exp_()
            normaliser = likelihood.sum(dim=-1, keepdim=True)
            loss += ((largest + normaliser.log() - hit) * scale).sum()
            if not any(wants):
                continue
            dlogits = likelihood.mul_(scale / normaliser)
            if smoothing:
                dlogits -= smoothing / dlogits.shape[-1] * scale
            dlogits.scatter_add_(-1, target, (smoothing - 1) * scale)
            if dbias is not None:
                dbias += dlogits.sum(0)
            dlogits = dlogits.to(x.dtype)
            if dx is not None:
                dx[part] = dlogits @ weight.to(x.dtype)
            if dweight is not None:
                dweight += dlogits.mT @ x[part]
        ctx.save_for_backward(dx, dweight, dbias, x, weight, bias, labels)
        ctx.smoothing = smoothing
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return loss

    @staticmethod
    def backward(ctx, dloss):  # type: ignore[no-untyped-def]
        dx, dweight, dbias, *inputs = ctx.saved_tensors
        if differentiable_again():
            return gradients(plain_cross_entropy, (*inputs, ctx.smoothing), (dloss,))
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            None if dx is None else dx * dloss.to(dx.dtype),
            None if dweight is None else (dweight * dloss).to(weight_dtype),
            None if dbias is None else (dbias * dloss).to(bias_dtype),
            None,
            None,
        )
