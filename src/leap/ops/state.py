"""What a causal attention keeps of the past: tensors whose first axis is the batch.

A state is a value. Nothing changes it in place, so keeping an old one is a snapshot, handing one
to two continuations is a fork, and gradients flow through it as through any other tensor.

    rows       `select` (pick, reorder), `repeat` (beams, roll-outs) and `concat`
    autograd   `detach` (truncated back-propagation through time)
    place      `to` (device), `n_bytes`, `save` and `load_state` (safetensors)
    time       `merge` (the state of A then B), `record` and `rollback` (take the last tokens back)
    shape      `reserve` (room for all that it can hold, so that reading on changes no shape)
"""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar, dataclass_transform

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from leap.errors import FileError, InputError
from leap.ops.backends import traces

# Type variables and not `S`, which the shape checker of the tests does not know.
S = TypeVar("S", bound="State")
R = TypeVar("R", bound="Recurrent")
J = TypeVar("J", bound="Joint")

SUMMED_AT_ONCE = 256
TAG = "leap_state"  # The entry of a file's metadata that says which states the tensors make up.


@dataclass(frozen=True, eq=False)
class State:
    """Base of all states. Fields are tensors `[b, ...]`, further states, or None."""

    def map(self: S, change: Callable[[Tensor], Tensor]) -> S:
        """Apply `change` to every tensor, those of a recorded trail included."""

        def walk(value: Any) -> Any:
            if isinstance(value, Tensor):
                return change(value)
            return value.map(change) if isinstance(value, State | Trail) else value

        return replace(self, **{f.name: walk(getattr(self, f.name)) for f in fields(self)})

    def select(self: S, rows: Tensor) -> S:
        """Keep the given rows of the batch, in the given order; a row may come many times."""
        return self.map(lambda x: x.index_select(0, rows.to(x.device)))

    def repeat(self: S, times: int) -> S:
        """Repeat each row `times` times where it stands: `a b` becomes `a a b b`."""
        return self.map(lambda x: x.repeat_interleave(times, dim=0))

    def concat(self: S, others: Iterable[S]) -> S:
        """The rows of this state, then those of the others; recorded trails are not kept."""

        def join(*values: Any) -> Any:
            if isinstance(values[0], Tensor):
                return torch.cat(values)
            return values[0].concat(values[1:]) if isinstance(values[0], State) else None

        others = list(others)
        return replace(
            self,
            **{
                f.name: join(getattr(self, f.name), *(getattr(other, f.name) for other in others))
                for f in fields(self)
            },
        )

    def detach(self: S) -> S:
        """The same numbers, cut off from the graph that made them."""
        return self.map(Tensor.detach)

    def to(self: S, device: torch.device | str) -> S:
        """The state on another device. Its precision is its own and does not change."""
        return self.map(lambda x: x.to(device))

    @property
    def n_bytes(self) -> int:
        """Memory the state takes, a recorded trail not counted."""
        return sum(x.numel() * x.element_size() for x in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its dotted name, a recorded trail left out."""
        found: dict[str, Tensor] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                found[f.name] = value
            elif isinstance(value, State):
                found |= {f"{f.name}.{name}": x for name, x in value.tensors().items()}
        return found

    def layout(self) -> dict[str, list[int]]:
        """Shape of each tensor, but for what differs between states of one layer."""
        found: dict[str, list[int]] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                found[f.name] = list(value.shape[1:])
            elif isinstance(value, State):
                found |= {f"{f.name}.{name}": x for name, x in value.layout().items()}
        return found

    def save(self, path: str | Path) -> None:
        """Write the state to a safetensors file, for `load_state` to read anywhere."""
        save_states(path, {"state": self})


@dataclass(frozen=True, eq=False, kw_only=True)
class Recurrent(State):
    """A state that tokens are read into one after another, and can be taken back out of.

    A subclass gives `advance`, which reads tokens without attending, and `merge`. While a state
    is recorded, rolling back replays the tokens that stay on top of an untouched older state, so
    that drafting and rejecting for ever leaves no drift behind.
    """

    length: Tensor
    """Tokens read so far, pads not counted, `[b]`."""
    trail: "Trail | None" = field(default=None, repr=False)
    """What was read since `record`, kept for `rollback`; None when not recording."""

    advance: ClassVar[Callable[..., Any]]
    """The state after reading tokens, named as in the op that reads them."""

    def merge(self: R, later: R) -> R:
        """The state after A then B, from the state after A and the one after B alone."""
        raise InputError(f"{type(self).__name__} cannot be merged")

    def reserve(self: R) -> R:
        """The same with room for all it can hold, as steps of `torch.export` need, if it grows."""
        return self

    def record(self: R, limit: int = 64) -> R:
        """Start keeping tokens as they are read, so that the last `limit` can be taken back.

        What one call reads is kept whole until the next, however long. A state that is recorded
        already keeps what it has, and from now on as much as `limit` says.
        """
        if limit < 1:
            raise InputError(f"record(limit={limit}) could take nothing back; give 1 or more")
        trail = self.trail or Trail(replace(self, trail=None), {}, limit)
        return replace(self, trail=replace(trail, limit=limit))

    def after(self: R, earlier: "Recurrent | None", **tokens: Tensor) -> R:
        """This state, got from `earlier` by reading `tokens`, with the trail of `earlier`."""
        if earlier is None or earlier.trail is None:
            return self
        return replace(self, trail=earlier.trail.extended(tokens))

    def rollback(self: R, n: int) -> R:
        """The state before its last `n` tokens, pads counted, from the recorded trail."""
        n_recorded = self.trail.n_tokens if self.trail is not None else 0
        if not 0 <= n <= n_recorded:
            raise InputError(
                f"cannot take back {n} tokens, {n_recorded} are recorded; "
                f"call state.record(limit={max(n, 1)}) before reading them"
            )
        return self if self.trail is None else self.trail.rewound(n_recorded - n)  # type: ignore[return-value]


@dataclass(frozen=True, eq=False, kw_only=True)
class Joint(Recurrent):
    """States that have read the same tokens, as one: what is taken back is taken back from each."""

    @classmethod
    def of(cls: type[J], *parts: Recurrent) -> J:
        """Its parts, in the order of its fields, as one."""
        return cls(*parts, length=parts[0].length.clone())  # files do not store a tensor twice

    def reserve(self: J) -> J:
        """The same with room for all that each of them can hold."""
        return self._each(lambda part: part.reserve())

    def record(self: J, limit: int = 64) -> J:
        """Start keeping tokens as they are read, so that the last `limit` can be taken back."""
        return self._each(lambda part: part.record(limit))

    def rollback(self: J, n: int) -> J:
        """The state before its last `n` tokens, pads counted, from the recorded trails."""
        return self._each(lambda part: part.rollback(n))

    def _each(self: J, change: Callable[[Recurrent], Recurrent]) -> J:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        parts: dict[str, Any] = {
            name: change(x) for name, x in values.items() if isinstance(x, Recurrent)
        }
        # A copy, as files do not store a tensor twice.
        return replace(self, **parts, length=next(iter(parts.values())).length.clone())


@dataclass(frozen=True, eq=False)
class Trail:
    """An older state and the tokens read since, newest last, each tensor `[b, h or 1, t, ...]`."""

    base: Recurrent
    tokens: dict[str, Tensor]
    limit: int

    @property
    def n_tokens(self) -> int:
        """How many tokens can be taken back."""
        return next(iter(self.tokens.values())).shape[2] if self.tokens else 0

    def map(self, change: Callable[[Tensor], Tensor]) -> "Trail":
        """Apply `change` to every tensor."""
        tokens = {name: change(x) for name, x in self.tokens.items()}
        return replace(self, base=self.base.map(change), tokens=tokens)

    def extended(self, new: dict[str, Tensor]) -> "Trail":
        """The trail after reading `new`; tokens too old to be taken back sink into the base."""
        old = self.tokens or {name: x[:, :, :0] for name, x in new.items()}
        tokens = {name: torch.cat([old[name], x], dim=2) for name, x in new.items()}
        # Let as many again gather before they sink, or each token would be read twice at once.
        n_new, n_all = (next(iter(each.values())).shape[2] for each in (new, tokens))
        n_sunk = n_all - max(self.limit, n_new)
        if n_sunk <= self.limit:
            return replace(self, tokens=tokens)
        base = self.base.advance(**{name: x[:, :, :n_sunk] for name, x in tokens.items()})
        return replace(
            self, base=base, tokens={name: x[:, :, n_sunk:] for name, x in tokens.items()}
        )

    def rewound(self, n_kept: int) -> Recurrent:
        """The state after the first `n_kept` of the tokens, itself recorded on."""
        tokens = {name: x[:, :, :n_kept] for name, x in self.tokens.items()}
        state = self.base.advance(**tokens) if n_kept else self.base
        return replace(state, trail=replace(self, tokens=tokens))


KINDS: dict[str, type[State]] = {}  # Every kind of state by its class name, as written into files.


@dataclass_transform(frozen_default=True, eq_default=False)
def state(cls: type[S]) -> type[S]:
    """Make a class a kind of state: a frozen dataclass that files and `torch.export` know."""
    KINDS[cls.__name__] = made = dataclass(frozen=True, eq=False)(cls)
    torch.export.register_dataclass(made, serialized_type_name=f"leap.{made.__name__}")
    return made


def save_states(path: str | Path, states: Mapping[str, State]) -> None:
    """Write several states, by name, to one safetensors file."""
    tensors: dict[str, Tensor] = {}
    kinds: dict[str, str] = {}
    for name, value in states.items():
        kinds |= state_kinds(name, value)
        tensors |= {
            f"{name}.{inner}": x.detach().cpu().contiguous() for inner, x in value.tensors().items()
        }
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.part")
    try:
        # `save_file` would let nobody but the user read it, whatever umask says.
        unfinished.write_bytes(save(tensors, metadata={TAG: json.dumps(kinds)}))
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def load_states(path: str | Path, device: torch.device | str = "cpu") -> dict[str, State]:
    """Read the states that `save_states` wrote."""
    path = Path(path)
    if not path.is_file():
        raise FileError(f"no state file at {path}")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise FileError(f"{path} is not a whole safetensors file: {error}") from error
    try:
        kinds = dict(json.loads(metadata[TAG]))
        return {name: build_state(name, kinds, tensors) for name in kinds if "." not in name}
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(
            f"{path} holds no state that this version knows ({error}); write one by state.save"
        ) from error


def load_state(path: str | Path, device: torch.device | str = "cpu") -> State:
    """Read the state that `State.save` wrote."""
    states = load_states(path, device)
    if list(states) != ["state"]:
        raise FileError(f"{path} holds {len(states)} states by name; read it with load_states")
    return states["state"]


def state_kinds(name: str, value: State) -> dict[str, str]:
    """The class of a state and of each state inside it, by dotted name."""
    found = {name: type(value).__name__}
    for f in fields(value):
        inner = getattr(value, f.name)
        if isinstance(inner, State):
            found |= state_kinds(f"{name}.{f.name}", inner)
    return found


def build_state(name: str, kinds: Mapping[str, str], tensors: Mapping[str, Tensor]) -> State:
    """The state of a name, of the classes and the tensors that dotted names tell."""
    kind = KINDS[kinds[name]]
    values: dict[str, Any] = {}
    for f in fields(kind):
        inner = f"{name}.{f.name}"
        if inner in kinds:
            values[f.name] = build_state(inner, kinds, tensors)
        elif inner in tensors:
            values[f.name] = tensors[inner]
        elif f.default is MISSING:
            raise KeyError(f"{inner} is missing")
    return kind(**values)


def accumulator(*tensors: Tensor) -> torch.dtype:
    """The dtype that sums over these are kept in: half precision cannot hold a whole past."""
    dtype = torch.float32
    for x in tensors:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def finest(device: torch.device | str) -> torch.dtype:
    """The finest precision there is; Apple's graphics processors know no float64."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b where the sum may be over a million tokens: of many, in the finest precision.

    In float32 a product of torch can be off by 1e-2 then. A few are summed as they are, and fast.
    """
    if traces() or b.shape[-2] <= SUMMED_AT_ONCE:
        return a @ b
    pairs = zip(a.split(SUMMED_AT_ONCE, -1), b.split(SUMMED_AT_ONCE, -2), strict=True)
    total: Tensor = sum((x @ y).to(finest(a.device)) for x, y in pairs)
    return total


def as_given(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which products keep the precision of what is multiplied.

    Autocast would round to half precision what an op has just brought to full.
    """
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return nullcontext()  # The meta device has none.
    return torch.autocast(kind, enabled=False)


def mask_tokens(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """`x` `[b, h, t, ...]` with 0 at pads, whatever stood there; mask `[b, t]` or `[b, 1, t]`."""
    if key_mask is None:
        return x
    pads = ~key_mask.reshape(x.shape[0], 1, x.shape[2], *[1] * (x.ndim - 3))
    return x.masked_fill(pads, 0)


def count_tokens(x: Tensor, key_mask: Tensor | None) -> Tensor | int:
    """Real tokens a row, of `x` `[b, h, t, ...]`."""
    return x.shape[2] if key_mask is None else key_mask.flatten(1).sum(1)
