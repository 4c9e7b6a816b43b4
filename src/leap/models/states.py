"""States that belong together: all that a model keeps of some streams, a row for each."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from leap.ops.state import State, load_states, save_states


@dataclass(frozen=True)
class States:
    """Named states, as values: nothing changes them in place, so keeping them is a snapshot."""

    by_name: Mapping[str, State]

    def __getitem__(self, name: str) -> State:
        return self.by_name[name]

    def of(self, part: str) -> list[State]:
        """Those called `part-0`, `part-1`, ..."""
        found: list[State] = []
        while (state := self.by_name.get(f"{part}-{len(found)}")) is not None:
            found.append(state)
        return found

    def with_part(self, part: str, states: Iterable[State]) -> "States":
        """The same with other states for one part."""
        return States({**self.by_name, **{f"{part}-{i}": x for i, x in enumerate(states)}})

    def select(self, rows: Tensor | Sequence[int]) -> "States":
        """Some of the rows, in the given order."""
        chosen = torch.as_tensor(rows, dtype=torch.long)
        return self._map(lambda state: state.select(chosen))

    def concat(self, others: Iterable["States"]) -> "States":
        """The rows of these, then those of the others."""
        others = list(others)
        return States(
            {
                name: state.concat([other[name] for other in others]) if others else state
                for name, state in self.by_name.items()
            }
        )

    def to(self, device: torch.device | str) -> "States":
        """The states on another device."""
        return self._map(lambda state: state.to(device))

    @property
    def n_bytes(self) -> int:
        """Memory they take."""
        return sum(state.n_bytes for state in self.by_name.values())

    def layout(self) -> dict[str, dict[str, list[int]]]:
        """Shape of each tensor, but for what differs between states of one model."""
        return {name: state.layout() for name, state in self.by_name.items()}

    def save(self, path: str | Path) -> None:
        """Write them to one safetensors file."""
        save_states(path, self.by_name)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> "States":
        """Read what `save` wrote."""
        return cls(load_states(path, device))

    def _map(self, change: Callable[[State], State]) -> "States":
        return States({name: change(state) for name, state in self.by_name.items()})
