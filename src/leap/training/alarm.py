"""An alarm for learned parts that no longer say anything: constant, all 0 or all 1.

Proportions that are the same for all tokens re-weight nothing, gates at 1 never forget, a focus
that is flat makes a plain mean. The loss does not show it. After each evaluation the model reads
one held-out example, and a part that has come to this is told of, once, with its layer and what
may help. Heads may specialise: a part is at fault only if all its heads are.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import TrainerCallback

from leap.layers.equalise import Noted, noted
from leap.layers.travel import Steps
from leap.reports.progress import Say

SAME = 2e-4
"""Standard deviation over tokens, in a part's own unit, below which it is taken for constant."""
SAME_GATE = 2e-3
"""The same for gates, in shares of what a gate forgets on average."""
EDGE = 1e-3
"""How near to 0 or 1 all of a part must be to be taken for it."""
FORGOTTEN = 0.01
"""Share of a text below which gates are said to forget nothing."""
TAKES_ALL = 0.99
"""Share of one token above which a focus is said to see nothing else."""


class Alarm(TrainerCallback):
    """Tells of parts that have degenerated, after each evaluation, each once.

    The standard deviations go into the history too, as `spread`, by the names of the modules.

    Args:
        batch: an example, as the model's forward takes it.
        say: told the warning.
    """

    def __init__(self, batch: Mapping[str, Any], say: Say) -> None:
        self.batch = batch
        self.say = say
        self.told: set[str] = set()

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Look at the model, and tell what is new."""
        spreads = {}
        for name, (module, values) in read_off(model, self.batch).items():
            spreads[name] = round(float(values.std(0).mean()), 6)
            fault = find_fault(module, values)
            warning = None if fault is None else f"{_where(name)}: {fault}"
            if warning is not None and warning not in self.told:
                self.told.add(warning)
                if state.is_world_process_zero:
                    self.say(f"after {state.global_step} steps, {warning}")
        if spreads and state.log_history:
            state.log_history[-1]["spread"] = spreads


@torch.no_grad()
def read_off(
    model: nn.Module, batch: Mapping[str, Any]
) -> dict[str, tuple[Noted, Float[Tensor, "n c"]]]:
    """What each part of a model reads off the real tokens of a batch: a column per head or channel.

    Gates are as they multiply, not as logarithms.
    """
    modules = dict(model.named_modules())
    if not any(isinstance(module, Noted) for module in modules.values()):
        return {}
    device = next(model.parameters()).device
    given = {k: x.to(device) if isinstance(x, Tensor) else x for k, x in batch.items()}
    was_training = model.training
    model.eval()
    try:
        # Attentions that sample must not change what the run draws next.
        with torch.random.fork_rng(), noted(model) as notes:
            model(**given)
    finally:
        model.train(was_training)
    found = {}
    for name, calls in notes.items():
        module = modules[name]
        assert isinstance(module, Noted)
        if calls:
            values = _columns(calls[0], given.get("attention_mask"))
            found[name] = module, values.exp() if module.part == "gates" else values
    return found


def find_fault(module: Noted, values: Float[Tensor, "n c"]) -> str | None:
    """What is wrong with a part, and what to try; None if nothing is."""
    if len(values) < 2:
        return None
    check = _steps if isinstance(module, Steps) else CHECKS.get(module.part)
    return None if check is None else check(values)


def _proportions(p: Tensor) -> str | None:
    if float(p.max()) < EDGE or float(p.min()) > 1 - EDGE:
        return (
            f"all proportions are {float(p.mean()):.3f}, where they learn no more; try a lower "
            "learning_rate, or proportion='travelled'"
        )
    if float(p.std(0).max()) < SAME:
        return (
            f"proportions are the same for all tokens ({float(p.mean()):.3f}), and re-weight "
            "nothing; try proportion='travelled', or proportion_per_head"
        )
    return None


def _steps(d: Tensor) -> str | None:
    if float(d.max()) < EDGE:
        return (
            f"no step is longer than {float(d.max()):.1g}, so that all tokens stand at one place; "
            "try a lower learning_rate, or constant_steps"
        )
    if float((d.std(0) / d.mean(0).clamp_min(EDGE)).max()) < SAME:
        return (
            f"all steps are equally long ({float(d.mean()):.3f}), and places only count tokens; "
            "try proportion_hidden=16, or constant_steps, which costs less"
        )
    return None


def _gates(gate: Tensor) -> str | None:
    if float(gate.max()) < EDGE:
        return (
            "all gates are 0, so that a token forgets all before it; try a lower learning_rate, a "
            "longer warmup, or no gate"
        )
    if float((1 - gate).max()) * len(gate) < FORGOTTEN:
        return (
            f"all gates are 1, and forget nothing over {len(gate)} tokens; try longer texts, or no "
            "gate, which costs less"
        )
    fades = -gate.clamp_min(torch.finfo(gate.dtype).tiny).log()
    if float((fades.std(0) / fades.mean(0).clamp_min(torch.finfo(fades.dtype).tiny)).max()) < (
        SAME_GATE
    ):
        return (
            "gates are the same for all tokens, and only fade with distance; try "
            "position_embedding='alibi', which costs less, or a higher learning_rate"
        )
    return None


def _focus(logits: Tensor) -> str | None:
    if float(logits.std(0).max()) < SAME:
        return (
            "the focus is the same for all tokens, and attention a plain mean; try a higher "
            "learning_rate, or another formulation"
        )
    if float(logits.softmax(0).amax(0).min()) > TAKES_ALL:
        return (
            f"in every head one token has more than {TAKES_ALL:.0%} of the focus; try a lower "
            "learning_rate, or weight_decay"
        )
    return None


def _rotations(turn: Tensor) -> str | None:
    if float(turn.std(0).max()) < SAME:
        return (
            "all tokens turn alike, as with position_embedding='rotary'; use that, which costs "
            "less, or try a higher learning_rate"
        )
    return None


CHECKS: dict[str, Callable[[Tensor], str | None]] = {
    "proportions": _proportions,
    "gates": _gates,
    "focus": _focus,
    "rotations": _rotations,
}
"""What can be wrong with a part, by its name; steps, which are proportions too, go before."""


def _columns(
    value: Float[Tensor, "b h t *c"], mask: Bool[Tensor, "b t"] | Tensor | None
) -> Float[Tensor, "n c"]:
    """Tokens as rows, heads and channels as columns; without pads where it is known which are."""
    rows = value.float().transpose(1, 2).flatten(2)
    if mask is not None and mask.shape == rows.shape[:2]:
        return rows[mask.bool()]
    return rows.flatten(0, 1)


def _where(name: str) -> str:
    """A module's place, in a line: `layer 2`, or of a translation model `encoder layer 2`."""
    layer = re.search(r"layers\.(\d+)", name)
    parts = [part for part in ("encoder", "decoder", "cross") if part in name]
    return " ".join([*parts, f"layer {layer[1]}" if layer else name])
