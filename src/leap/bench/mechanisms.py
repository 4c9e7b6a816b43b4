"""The attentions that are measured by themselves: those of the one list that have a definition."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

from leap.errors import LeapError
from leap.layers.definitions import Definition
from leap.models.mechanisms import ATTENTIONS
from leap.ops.backends import BACKENDS, using
from leap.ops.tolerance import TOLERANCES, relative_error

Inputs = Mapping[str, Tensor]

SLACK = 4  # Feature maps round as well, and the table of tolerances is that of the ops alone.


def mechanisms(windows: Iterable[int] = ()) -> list[Definition]:
    """All definitions, the causal ones first and softmax before the others; with each window."""
    found = []
    for defined in (x for attention in ATTENTIONS.values() for x in attention.definitions):
        found.append(defined)
        for w in windows if defined.can_have_window else ():
            attend = partial(defined.attend, window=w)
            found.append(replace(defined, name=f"{defined.name}-w{w}", window=w, attend=attend))
    return sorted(found, key=lambda x: (not x.causal, x.name != x.baseline))


FLASH = "softmax-flash"
HALVES = (torch.float16, torch.bfloat16)


def peers(device: torch.device, dtype: torch.dtype) -> list[Definition]:
    """What others have for the same inputs on a GPU: a kernel of SDPA, flash-linear-attention."""
    if device.type != "cuda":
        return []
    known = {defined.name: defined for defined in mechanisms()}
    found = []
    if dtype in HALVES:
        found.append(replace(known["softmax"], name=FLASH, attend=_by_flash))
    if BACKENDS["fla"].missing() is None and dtype != torch.float64:
        for name in ("linear", "linear-gated", "leapformer"):
            attend = partial(_by_backend, "fla", known[name].attend)
            found.append(replace(known[name], name=f"{name}-fla", attend=attend))
    return found


def missing_peers(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Those of a GPU that are not measured, each with the reason."""
    if device.type != "cuda":
        return []
    found = [] if dtype in HALVES else [f"{FLASH} (it takes float16 and bfloat16)"]
    reason = BACKENDS["fla"].missing()
    return found if reason is None else [*found, f"fla ({reason})"]


def _by_flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=True)


def _by_backend(name: str, attend: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    with using(name):
        return attend(*arguments)


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


def check_definition(mechanism: Definition, inputs: Inputs) -> None:
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
