"""The attentions that are measured, each once: what it takes, how it is called, what it means.

Every one of them is a weighted mean of values under some non-negative scores a_ij,

    o_i = sum_j a_ij v_j  /  sum_j a_ij        over the tokens j that token i sees

so an entry of the list is its scores, in the open, next to the fast call that must agree with
them. To measure another attention, add its entry to `mechanisms`: nothing else names them.

Axes: b batch, h heads, t tokens, d width of a head.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu, scaled_dot_product_attention

from leap.errors import LeapError
from leap.ops import (
    additive_attention,
    causal_linear_attention,
    causal_proportional_attention,
    linear_attention,
)
from leap.ops.features import positional, proportional
from leap.ops.tolerance import TOLERANCES, relative_error

Inputs = Mapping[str, Tensor]

SLACK = 4  # Feature maps round as well, and the table of tolerances is that of the ops alone.


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """An attention, from projected inputs to attended values, feature maps included."""

    name: str
    arguments: tuple[str, ...]
    """What `attend` takes, by the names of `make_inputs`; the values `v` last."""
    scores: Callable[..., Tensor]
    """The definition: a_ij of the other arguments, broadcasting to `[b, h, t, t]`."""
    attend: Callable[..., Tensor]
    """The fast version, which is what gets measured."""
    causal: bool = True
    window: int | None = None
    """How many tokens, the last being itself, a token sees; None for no limit."""

    @property
    def baseline(self) -> str:
        """Name of the softmax attention to compare with: the one that sees as far ahead."""
        return "softmax" if self.causal else "softmax-bidirectional"

    def define(self, *arguments: Tensor) -> Tensor:
        """The definition in O(t^2), for the arguments of `attend`."""
        *scored, v = arguments
        t = v.shape[2]
        ago = torch.arange(t)[:, None] - torch.arange(t)
        seen = ago < (self.window or t)
        if self.causal:
            seen &= ago >= 0
        a = self.scores(*scored) * seen
        return a @ v / a.sum(-1, keepdim=True).clamp_min(1e-6)


def mechanisms(windows: Iterable[int] = ()) -> list[Mechanism]:
    """Every mechanism, the baselines among them, and LEAP also with each of the windows."""
    return [
        Mechanism(
            name="softmax",
            arguments=("q", "k", "v"),
            scores=softmax_scores,
            attend=lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
        ),
        Mechanism(
            name="leapformer",
            arguments=("q", "k", "p", "s", "v"),
            scores=leapformer_scores,
            attend=leapformer,
        ),
        Mechanism(
            name="cosformer",
            arguments=("q", "k", "v"),
            scores=cosformer_scores,
            attend=lambda q, k, v: causal_linear_attention(by_position(q), by_position(k), v)[0],
        ),
        Mechanism(
            name="linear",
            arguments=("q", "k", "v"),
            scores=linear_scores,
            attend=lambda q, k, v: causal_linear_attention(relu(q), relu(k), v)[0],
        ),
        Mechanism(
            name="linear-gated",
            arguments=("q", "k", "gate", "v"),
            scores=gated_scores,
            attend=lambda q, k, gate, v: causal_linear_attention(
                relu(q), relu(k), v, log_gate=gate
            )[0],
        ),
        Mechanism(
            name="leap",
            arguments=("focus", "v"),
            scores=leap_scores,
            attend=lambda focus, v: additive_attention(focus, v)[0],
        ),
        *(
            Mechanism(
                name=f"leap-w{window}",
                arguments=("focus", "v"),
                scores=leap_scores,
                attend=lambda focus, v, w=window: additive_attention(focus, v, window=w)[0],
                window=window,
            )
            for window in windows
        ),
        Mechanism(
            name="softmax-bidirectional",
            arguments=("q", "k", "v"),
            scores=softmax_scores,
            attend=scaled_dot_product_attention,
            causal=False,
        ),
        Mechanism(
            name="leapformer-bidirectional",
            arguments=("q", "k", "p", "s", "v"),
            scores=leapformer_scores,
            attend=lambda q, k, p, s, v: linear_attention(
                proportional(relu(q), p), proportional(relu(k), s), v
            ),
            causal=False,
        ),
    ]


def leapformer(q: Tensor, k: Tensor, p: Tensor, s: Tensor, v: Tensor) -> Tensor:
    """LeaPformer over ReLU features."""
    o, _ = causal_proportional_attention(relu(q), relu(k), v, p, s)
    return o


def softmax_scores(q: Tensor, k: Tensor) -> Tensor:
    """exp(q_i . k_j / sqrt(d))."""
    return (q @ k.mT / math.sqrt(q.shape[-1])).exp()


def linear_scores(q: Tensor, k: Tensor) -> Tensor:
    """relu(q_i) . relu(k_j)."""
    return relu(q) @ relu(k).mT


def gated_scores(q: Tensor, k: Tensor, gate: Tensor) -> Tensor:
    """relu(q_i) . relu(k_j) exp(gate_{j+1} + ... + gate_i)."""
    total = gate.cumsum(-1)
    # Above the diagonal the difference is positive, and not wanted.
    return linear_scores(q, k) * (total[..., :, None] - total[..., None, :]).clamp(max=0).exp()


def leapformer_scores(q: Tensor, k: Tensor, p: Tensor, s: Tensor) -> Tensor:
    """relu(q_i) . relu(k_j) cos(pi/2 (p_i - s_j))."""
    return linear_scores(q, k) * torch.cos(math.pi / 2 * (p[..., :, None] - s[..., None, :]))


def cosformer_scores(q: Tensor, k: Tensor) -> Tensor:
    """relu(q_i) . relu(k_j) cos(pi/2 (i - j) / t)."""
    place = torch.arange(q.shape[2], dtype=q.dtype) / q.shape[2]
    return leapformer_scores(q, k, place, place)


def leap_scores(focus: Tensor) -> Tensor:
    """exp(focus_j)."""
    return focus.exp()[..., None, :]


def by_position(x: Tensor) -> Tensor:
    """CosFormer's features of queries or keys."""
    return positional(relu(x), x.shape[2])


def make_inputs(
    *, batch: int, heads: int, tokens: int, width: int, seed: int = 0
) -> dict[str, Tensor]:
    """Random tensors of every kind a mechanism takes, and `upstream`, its output's gradient."""
    random = torch.Generator().manual_seed(seed)
    wide, narrow = (batch, heads, tokens, width), (batch, heads, tokens)
    inputs = {name: torch.randn(wide, generator=random) for name in ("q", "k", "v", "upstream")}
    inputs |= {name: torch.randn(narrow, generator=random).sigmoid() for name in ("p", "s")}
    inputs |= {name: torch.randn(narrow, generator=random) for name in ("focus", "gate")}
    return inputs | {"gate": logsigmoid(inputs["gate"])}


def check_definition(mechanism: Mechanism, inputs: Inputs) -> None:
    """Raise an error unless outputs and gradients are those of the definition in double precision.

    A fast wrong answer is worth no measurement.
    """
    exact = {name: x.double().cpu() for name, x in inputs.items()}
    truths = _with_gradients(mechanism.define, mechanism.arguments, exact)
    found = _with_gradients(mechanism.attend, mechanism.arguments, inputs)
    tolerance = TOLERANCES[inputs["v"].dtype]
    for name, truth in truths.items():
        limit = SLACK * (tolerance.output if name == "output" else tolerance.gradient)
        error = relative_error(found[name].cpu(), truth)
        if not error <= limit:
            raise LeapError(
                f"{mechanism.name} disagrees with its definition: the {name} is off by {error:.1e} "
                f"of its largest number, where {limit:.1e} is allowed; its speed was not measured"
            )


def _with_gradients(
    attend: Callable[..., Tensor], names: Sequence[str], inputs: Inputs
) -> dict[str, Tensor]:
    """The output, and the gradients by all arguments as one vector."""
    arguments = [inputs[name].detach().requires_grad_() for name in names]
    o = attend(*arguments)
    gradients = torch.autograd.grad(o, arguments, inputs["upstream"])
    return {"output": o.detach(), "gradient": torch.cat([x.flatten() for x in gradients])}
