"""How much each token of a text counts for one prediction, by several methods.

    weights                what the predicting token takes of each, mean of layers and heads; in
                           LEAP this is the focus
    weights-norm           each weight times the length of what the values add
    logit                  v_j . dy/dv_j, over all layers: the exact part of token j in what each
                           layer gave, as far as it points to the prediction y
    roll-out               attention roll-out over all layers
    roll-up                x_j . dy/dx_j with weights, gates and scales held: see below
    roll-up-unsigned       its size alone: fair to compare with weights, which have no sign
    gradient               x_j . dy/dx_j
    integrated-gradients   the same along a path from no embedding at all (captum)
    recency, random        to compare with

y is the log-probability of a token or a class, x the embeddings. With weights, gates, the scales
of norms and the slopes of activations held as they are, a model is linear in its embeddings, so
that x_j . dy/dx_j of a logit is the exact contribution of token j through all layers, and adds up
to the logit less what biases give (Ali et al. 2022, arXiv 2202.07304, for softmax attention). All
of them take one pass forward and one backward, in O(t) for linear attention; roll-out and weights
see no sign, the others do.

Axes: b batch, t tokens, d hidden size, n classes or tokens of the vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from leap.errors import ConfigError
from leap.explain.attention import explain
from leap.explain.trace import copy_of, reading, trace
from leap.layers import Attention
from leap.layers.convolution import ShortConvolution
from leap.ops.convolution import causal_convolution

DEFAULT = "roll-up"
"""The method that was most faithful, see benchmarks/explain."""
PATH_STEPS = 16
"""Points of the path of integrated gradients."""
UNLEARNED = 982_451_653
"""Random seed of parameters to compare with: none that a run would begin with, as 0."""
VALUE_PARTS = ("v_proj", "o_proj", "convolution", "norm")
"""Parts of an attention that values pass; all others weigh or gate."""


def log_probabilities(model: PreTrainedModel, **inputs: Any) -> Float[Tensor, "b n"]:
    """What a model predicts: the next token of a text, or its class.

    Args:
        model: a language model or a classifier.
        inputs: input_ids or inputs_embeds, and attention_mask. Tokens that it leaves out are as if
            they had never been there.
    """
    return predicted_logits(model, **inputs).float().log_softmax(dim=-1)


def predicted_logits(model: PreTrainedModel, **inputs: Any) -> Float[Tensor, "b n"]:
    """Logits of what a model predicts."""
    options = reading(model)
    if not options:
        return model(**inputs).logits
    mask = inputs.get("attention_mask")
    if mask is not None and not any(isinstance(m, Attention) for m in model.modules()):
        # Others count pads.
        inputs["position_ids"] = (mask.long().cumsum(dim=1) - 1).clamp_min(0)
    return model(**inputs, logits_to_keep=1, **options).logits[:, -1]


Method = Callable[[PreTrainedModel, Tensor, int], Tensor]
"""Importance `[t]` of the tokens `[1, t]` for a target; more is more."""


def importance(
    model: PreTrainedModel, input_ids: Int[Tensor, "1 t"], target: int, method: str
) -> Float[Tensor, " t"]:
    """How much each token counts for a prediction.

    Args:
        model: a language model, which predicts what comes after the text, or a classifier.
        input_ids: the text.
        target: the token or the class that is predicted.
        method: its name in `METHODS`.
    """
    if method not in METHODS:
        raise ConfigError(f"method={method!r} is not known; there are {', '.join(METHODS)}")
    return METHODS[method](model, input_ids, target).detach().float()


def predicts_next(model: PreTrainedModel) -> bool:
    """Whether a model predicts the next token, rather than a class of the whole text."""
    return bool(reading(model))


def _at(model: PreTrainedModel) -> int | None:
    return -1 if predicts_next(model) else None


def _weights(model: PreTrainedModel, ids: Tensor, target: int) -> Tensor:
    if not any(isinstance(m, Attention) for m in model.modules()):
        return explain(model, ids).importance()[0].mean(dim=(0, 1))
    return trace(model, ids).rows(_at(model))[0].abs().mean(dim=(0, 1))


def _weights_norm(model: PreTrainedModel, ids: Tensor, target: int) -> Tensor:
    return trace(model, ids).norms(_at(model))[0].sum(dim=0)


def _roll_out(model: PreTrainedModel, ids: Tensor, target: int) -> Tensor:
    if not any(isinstance(m, Attention) for m in model.modules()):
        return explain(model, ids).through_layers()[0]
    return trace(model, ids).through_layers(_at(model))[0]


def _logit(model: PreTrainedModel, ids: Tensor, target: int) -> Tensor:
    copied = copy_of(model)
    values: list[Tensor] = []
    for layer in copied.modules():
        projection = getattr(layer, "v_proj", None) if isinstance(layer, Attention) else None
        if projection is not None:
            projection.register_forward_hook(lambda _m, _i, output: values.append(output))
    with torch.enable_grad():
        y = log_probabilities(copied, inputs_embeds=_embedded(copied, ids))[0, target]
        if not values:
            raise ConfigError(
                "method='logit' looks at values of attentions of leap; there are none"
            )
        gradients = torch.autograd.grad(y, values)
    parts = [(v * g).sum(-1)[0] for v, g in zip(values, gradients, strict=True)]
    return torch.stack(parts)[:, -ids.shape[1] :].sum(0)


def _gradient(model: PreTrainedModel, ids: Tensor, target: int) -> Tensor:
    return _times_gradient(model, ids, lambda m, x: log_probabilities(m, inputs_embeds=x), target)


def _roll_up(model: PreTrainedModel, ids: Tensor, target: int) -> Tensor:
    return _times_gradient(
        held(model), ids, lambda m, x: log_probabilities(m, inputs_embeds=x), target
    )


def _roll_up_unsigned(model: PreTrainedModel, ids: Tensor, target: int) -> Tensor:
    return _roll_up(model, ids, target).abs()


def _times_gradient(
    model: PreTrainedModel, ids: Tensor, score: Callable[[Any, Tensor], Tensor], target: int
) -> Tensor:
    with torch.enable_grad():
        embedded = _embedded(model, ids)
        (gradient,) = torch.autograd.grad(score(model, embedded)[0, target], embedded)
    return (embedded * gradient).sum(dim=-1)[0]


def _integrated_gradients(model: PreTrainedModel, ids: Tensor, target: int) -> Tensor:
    from captum.attr import IntegratedGradients

    with torch.enable_grad():
        found = IntegratedGradients(lambda x: log_probabilities(model, inputs_embeds=x)).attribute(
            _embedded(model, ids), target=target, n_steps=PATH_STEPS
        )
    return found.sum(dim=-1)[0]


def _recency(model: PreTrainedModel, ids: Tensor, target: int) -> Tensor:
    return torch.arange(ids.shape[1], device=ids.device, dtype=torch.float32)


def _random(model: PreTrainedModel, ids: Tensor, target: int) -> Tensor:
    # Of the text itself, so that it is the same each time.
    seed = int((ids.double() * torch.arange(1, ids.shape[1] + 1, device=ids.device)).sum())
    return torch.rand(ids.shape[1], generator=torch.Generator().manual_seed(seed))


METHODS: dict[str, Method] = {
    "weights": _weights,
    "weights-norm": _weights_norm,
    "logit": _logit,
    "roll-out": _roll_out,
    "roll-up": _roll_up,
    "roll-up-unsigned": _roll_up_unsigned,
    "gradient": _gradient,
    "integrated-gradients": _integrated_gradients,
    "recency": _recency,
    "random": _random,
}
"""Every method by its name."""


def contributions(model: PreTrainedModel, input_ids: Int[Tensor, "1 t"], target: int) -> Tensor:
    """What each token contributes to a logit through all layers, weights and gates held.

    They add up to the logit, less what biases and positions give, for attentions with a denominator
    in which the focus is not read off the values themselves.
    """
    score: Callable[[Any, Tensor], Tensor]
    score = lambda m, x: predicted_logits(m, inputs_embeds=x)  # noqa: E731
    return _times_gradient(held(model), input_ids, score, target).detach()


def _embedded(model: Any, ids: Tensor) -> Tensor:
    return model.get_input_embeddings()(ids).detach().requires_grad_()


def held(model: PreTrainedModel) -> Any:
    """A copy with the same weights in which all that weighs, gates or scales counts as constant.

    What it computes is the same; gradients pass by values, projections and residuals alone.
    """
    copied = copy_of(model)
    for layer in [m for m in copied.modules() if isinstance(m, Attention)]:
        for name, part in layer.named_children():
            if name not in VALUE_PARTS:
                for module in part.modules():
                    module.register_forward_hook(_detach)
    for module in list(copied.modules()):
        for name, part in list(module.named_children()):
            kind = HELD.get(type(part))
            if kind is not None:
                setattr(module, name, kind(part))
    return copied


def _detach(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    return output.detach() if isinstance(output, Tensor) else output


class _HeldNorm(nn.Module):
    """A layer norm whose scale is a constant."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        variance = x.detach().var(dim=-1, unbiased=False, keepdim=True)
        y = centred * (variance + self.norm.eps).rsqrt() * self.norm.weight
        return y if self.norm.bias is None else y + self.norm.bias


class _HeldGelu(nn.Module):
    """GELU as a factor that is a constant."""

    def __init__(self, gelu: nn.GELU) -> None:
        super().__init__()
        self.gelu = gelu

    def forward(self, x: Tensor) -> Tensor:
        tiny = torch.finfo(x.dtype).tiny
        near = torch.where(x.abs() < tiny, torch.full_like(x, tiny), x)
        return x * (self.gelu(near) / near).detach()


class _HeldConvolution(nn.Module):
    """A short convolution whose SiLU is a factor that is a constant."""

    def __init__(self, convolution: ShortConvolution) -> None:
        super().__init__()
        self.convolution = convolution

    def forward(self, x: Tensor, state: Any = None, **inputs: Any) -> tuple[Tensor, Any]:
        y, after = causal_convolution(x, self.convolution.weight, state, **inputs)
        return y * y.sigmoid().detach(), after


HELD: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    nn.LayerNorm: _HeldNorm,
    nn.GELU: _HeldGelu,
    ShortConvolution: _HeldConvolution,
}


@contextmanager
def random_state(seed: int) -> Iterator[None]:
    """Draw from a seed, and leave what others draw as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def with_random_parameters(model: PreTrainedModel, seed: int = UNLEARNED) -> PreTrainedModel:
    """A model of the same config that has learned nothing."""
    kind: Any = type(model)
    with random_state(seed):
        return kind(model.config).to(model.device).eval()
