"""What a learned part reads off tokens, and what it contributes: set it to its mean, and see.

A part that differs between tokens (steps, proportions, gates) does something only as far as it
differs. `equalised` holds every such part of a model at its mean over a text, head by head, so that
the loss with and without it tells what the differences are worth. `noted` shows what the parts
read off the tokens of a call.

Axes: b batch, h heads, t tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from leap.errors import ConfigError


class Noted:
    """A module that reads something off each token, which `noted` shows."""

    part: ClassVar[str]
    """What it is called by, as in `model.equalise("gates")`."""
    _notes: list[Tensor] | None = None

    def note(self, value: Float[Tensor, "b h t *c"]) -> None:
        """Keep what was read off tokens, while somebody asks for it."""
        if self._notes is not None:
            self._notes.append(value.detach())


class Learned(Noted, nn.Module):
    """A module that reads something off each token, and can be held at its mean."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[Tensor] | None = None
        self._held: Tensor | None = None

    def settled(self, value: Float[Tensor, "b h t *c"]) -> Float[Tensor, "b h t *c"]:
        """What was read off tokens, or its mean while that is held."""
        self.note(value)
        if self._seen is not None:
            total = value.detach().double().sum((0, 2))
            count = total.new_full((1,), value.shape[0] * value.shape[2])
            self._seen.append(torch.cat([total.flatten(), count]))
        if self._held is None:
            return value
        shape = (1, value.shape[1], 1, *value.shape[3:])
        return self._held.to(value.dtype).view(shape).expand_as(value)


@contextmanager
def noted(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """What each `Noted` module of a model reads off tokens in this context, by the module's name.

    There is a tensor for each call of it.
    """
    modules = {name: each for name, each in model.named_modules() if isinstance(each, Noted)}
    notes: dict[str, list[Tensor]] = {name: [] for name in modules}
    try:
        for name, module in modules.items():
            module._notes = notes[name]
        yield notes
    finally:
        for module in modules.values():
            module._notes = None


def learned_parts(model: nn.Module) -> list[str]:
    """The kinds of learned parts that a model has."""
    return sorted({module.part for module in model.modules() if isinstance(module, Learned)})


@contextmanager
def equalised(model: nn.Module, part: str, read: Callable[[], object]) -> Iterator[None]:
    """Hold all learned parts of a kind at their means over what `read` lets the model read.

    Args:
        model: holds the modules.
        part: which of them, by the name in `Learned.part`.
        read: runs the model over a text, once, before the means are held.
    """
    known = learned_parts(model)
    modules = [m for m in model.modules() if isinstance(m, Learned) and m.part == part]
    if not modules:
        raise ConfigError(
            f"equalise({part!r}): this model has no such learned part; "
            + (f"it has {', '.join(known)}" if known else "it has none at all")
        )
    for module in modules:
        module._seen = []
    try:
        with torch.no_grad():
            read()
        for module in modules:
            if not module._seen:
                raise ConfigError(f"equalise({part!r}): the text was not read by every layer")
            *totals, count = torch.stack(module._seen).sum(0).split(1)
            module._held = torch.cat(totals) / count
        for module in modules:
            module._seen = None
        yield
    finally:
        for module in modules:
            module._seen = module._held = None
