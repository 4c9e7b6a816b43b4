"""Attention weights on request: `output_attentions=True`, and what `leap.explain` shows.

No layer here forms its weights in order to attend. `Watch` notes what each layer is given, and
`Attention.weights` makes of it what was never formed, in O(t^2).
"""

from collections.abc import Iterable
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from leap.errors import InputError
from leap.layers.attention import Attention
from leap.ops.state import Recurrent

USED = ("source", "key_mask", "positions")
"""What weights depend on beside the tokens."""
INSTEAD = {
    "visible": "no schedule, and chunk_size=0 for an encoder that sees all",
    "cu_seqlens": "rows with pads, rather than packed sequences",
}
"""What hides tokens in ways that weights are not made for, and what to do without it."""


class Watch:
    """Note what attention layers are given, within a `with`.

    Args:
        layers: to look at, in the order in which to tell their weights; none for nothing.
    """

    def __init__(self, layers: Iterable[nn.Module] = ()) -> None:
        self.layers = list(layers)
        self.given: dict[nn.Module, dict[str, Any]] = {}

    def __enter__(self) -> "Watch":
        self.hooks = [
            layer.register_forward_pre_hook(self._note, with_kwargs=True) for layer in self.layers
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for hook in self.hooks:
            hook.remove()

    def weights(self) -> tuple[Tensor, ...] | None:
        """The weights of each layer `[b, h, t, s]`; None if there was nothing to look at."""
        found = []
        for layer in self.layers:
            assert isinstance(layer, Attention)
            found.append(layer.weights(**self.given[layer]))
        return tuple(found) or None

    def _note(self, layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        x, past = args[0], args[1] if len(args) > 1 else None
        if isinstance(past, Recurrent) and bool(past.length.any()):
            raise InputError(
                "output_attentions: a state does not keep the tokens that it has read, so there "
                "are no weights for them; give the whole text, without past_key_values, and "
                "generate() with use_cache=False"
            )
        for name, instead in INSTEAD.items():
            if options.get(name) is not None:
                raise InputError(
                    f"output_attentions: there are no weights under {name}; give {instead}"
                )
        used: dict[str, Any] = {name: options[name] for name in USED if name in options}
        self.given[layer] = {"x": x, **used}


def wants_weights(config: Any, options: dict[str, Any]) -> bool:
    """Whether a call of a model asks for attention weights, or else its config."""
    asked = options.get("output_attentions")
    return bool(config.output_attentions if asked is None else asked)
