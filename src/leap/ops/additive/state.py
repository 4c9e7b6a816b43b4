"""What additive attention keeps of the past: one total, or the tokens of a window.

A run of tokens is known by the triple of its peak m = max_j focus_j, its mass z and its sum s:

    z = sum_j exp(focus_j - m)        s = sum_j exp(focus_j - m) v_j        o = s / z

Two triples make the one of both runs, once both are brought to the higher peak. Where the peak
lies changes no mean, so no gradient goes through it.

Axes: b batch, h heads, t tokens, w tokens kept of a window, r places for more, p values.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from leap.errors import InputError
from leap.ops.additive.blocked import ceiling_over
from leap.ops.checks import shape
from leap.ops.state import (
    Recurrent,
    accumulator,
    as_given,
    count_tokens,
    finest,
    mask_tokens,
    product,
    state,
)


@state
class FocusState(Recurrent):
    """The triple of all tokens read so far, in float64.

    In float32 most tokens far into a sequence would be less than the rounding of the sums they
    are added to: after 100,000 steps at logits of spread 3, a mass is 1e-4 too small.
    """

    peak: Float[Tensor, "b h"]
    """The highest focus, -inf before the first token. Not differentiated."""
    mass: Float[Tensor, "b h"]
    sum: Float[Tensor, "b h p"]

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        values: int,
        *,
        device: torch.device | str = "cpu",
    ) -> "FocusState":
        """The state before the first token."""
        mass = torch.zeros(batch, heads, dtype=finest(device), device=device)
        return cls(
            peak=torch.full_like(mass, -torch.inf),
            mass=mass,
            sum=mass.new_zeros(batch, heads, values),
            length=torch.zeros(batch, dtype=torch.long, device=device),
        )

    @classmethod
    def of(
        cls,
        focus: Float[Tensor, "b h t"],
        v: Float[Tensor, "b h t p"],
        key_mask: Bool[Tensor, "b t"] | Bool[Tensor, "b 1 t"] | None = None,
    ) -> "FocusState":
        """The state after these tokens alone."""
        (b, h, t, p), dtype = v.shape, accumulator(focus, v)
        if t == 0:
            return cls.empty(b, h, p, device=v.device)
        length = torch.zeros(b, dtype=torch.long, device=v.device) + count_tokens(v, key_mask)
        focus, v = mask_focus(focus, key_mask).to(dtype), mask_tokens(v, key_mask).to(dtype)
        peak = focus.detach().amax(-1)
        weights = (focus - ceiling_over(peak).unsqueeze(-1)).exp()
        with as_given(v):
            sum = product(weights.unsqueeze(2), v).squeeze(2)
        return cls.made_of(peak, weights.sum(-1), sum, length)

    @classmethod
    def made_of(cls, peak: Tensor, mass: Tensor, sum: Tensor, length: Tensor) -> "FocusState":
        """The state of a triple of any precision."""
        peak, mass, sum = (x.to(finest(x.device)) for x in (peak.detach(), mass, sum))
        return cls(peak=peak, mass=mass, sum=sum, length=length)

    def sizes(self) -> tuple[int, ...]:
        """Batch, heads and values."""
        return tuple(self.sum.shape)

    def mean(self) -> Float[Tensor, "b h p"]:
        """The focus-weighted mean of all tokens read; 0 before the first."""
        # The highest weight is 1, so only the mass of no token at all is below.
        return self.sum / self.mass.clamp_min(1).unsqueeze(-1)

    def advance(
        self,
        *,
        focus: Float[Tensor, "b h t"],
        v: Float[Tensor, "b h t p"],
        key_mask: Bool[Tensor, "b t"] | Bool[Tensor, "b 1 t"] | None = None,
    ) -> "FocusState":
        """The state after reading tokens."""
        return self.merge(FocusState.of(focus, v, key_mask))

    def merge(self, later: "FocusState") -> "FocusState":
        """The state after A then B, from the state after A and the one after B alone."""
        if later.sum.shape != self.sum.shape:
            raise InputError(
                f"states of {shape(self.sum)} and {shape(later.sum)} are not of one layer: "
                "merge takes two of the same shape"
            )
        peak = torch.maximum(self.peak, later.peak).detach()
        ceiling = ceiling_over(peak)
        old, new = (self.peak.detach() - ceiling).exp(), (later.peak.detach() - ceiling).exp()
        return FocusState(
            peak=peak,
            mass=old * self.mass + new * later.mass,
            sum=old.unsqueeze(-1) * self.sum + new.unsqueeze(-1) * later.sum,
            length=self.length + later.length,
        )

    def elements(self) -> tuple[Tensor, Tensor, Tensor]:
        """The past as the kernel takes it: a single element."""
        return self.peak.detach().unsqueeze(2), self.sum.unsqueeze(2), self.mass.unsqueeze(2)


@state
class WindowState(Recurrent):
    """The last real tokens, one fewer than the window, in float32 (float64 for float64 inputs).

    They stand to the right. There are no more places than tokens were read, pads counted, until
    the window is full; those to the left that hold none, as after pads, have the focus -inf.
    """

    focus: Float[Tensor, "b h w"]
    v: Float[Tensor, "b h w p"]
    room: Float[Tensor, "b r 0"] | None = None
    """As many places as are still to come, and no numbers: it is there for its shape, by which a
    state knows its window. None if there are none."""

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        window: int,
        values: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "WindowState":
        """The state before the first token."""
        v = torch.zeros(batch, heads, 0, values, dtype=dtype, device=device)
        length = torch.zeros(batch, dtype=torch.long, device=device)
        return cls.made_of(v.new_zeros(v.shape[:3]), v, window, length)

    @classmethod
    def made_of(cls, focus: Tensor, v: Tensor, window: int, length: Tensor) -> "WindowState":
        """The state of these tokens, with room for as many more as the window has."""
        n = window - 1 - v.shape[2]
        return cls(focus, v, v.new_empty(v.shape[0], n, 0) if n else None, length=length)

    def sizes(self) -> tuple[int, ...]:
        """Batch, heads, window and values."""
        b, h, kept, p = self.v.shape
        more = 0 if self.room is None else self.room.shape[1]
        return b, h, kept + more + 1, p

    def layout(self) -> dict[str, list[int]]:
        """Heads, window and values: what stays the same as tokens are read."""
        return {"v": list(self.sizes()[1:])}

    def advance(
        self,
        *,
        focus: Float[Tensor, "b h t"],
        v: Float[Tensor, "b h t p"],
        key_mask: Bool[Tensor, "b t"] | Bool[Tensor, "b 1 t"] | None = None,
    ) -> "WindowState":
        """The state after reading tokens."""
        # A compiled step is compiled anew for every shape, so there it has one.
        past = self.reserve() if torch.compiler.is_compiling() else self
        length = self.length + count_tokens(v, key_mask)
        b, _, window, _ = self.sizes()
        t = v.shape[2]
        n_all = past.v.shape[2] + t
        n = min(n_all, window - 1)
        if key_mask is None:
            focus, v = _append(past.focus, focus, n), _append(past.v, v, n)
            return self.made_of(focus, v, window, length)
        # A stable sort brings the pads, and the places not yet filled, before the real tokens.
        real = torch.cat([past.filled(), key_mask.reshape(b, t)], dim=1)
        last = real.to(torch.uint8).argsort(dim=1, stable=True)[:, n_all - n :]
        real = real.take_along_dim(last, dim=1)
        focus, v = (_pick(old, new, last) for old, new in ((past.focus, focus), (past.v, v)))
        return self.made_of(mask_focus(focus, real), mask_tokens(v, real), window, length)

    def merge(self, later: "WindowState") -> "WindowState":
        """The state after A then B, from the state after A and the one after B alone."""
        if later.sizes() != self.sizes():
            raise InputError(
                f"states of batch, heads, window, values {list(self.sizes())} and "
                f"{list(later.sizes())} are not of one layer: merge takes two of the same"
            )
        both = self.advance(focus=later.focus, v=later.v, key_mask=later.filled())
        return replace(both, length=self.length + later.length)

    def concat(self, others: Iterable["WindowState"]) -> "WindowState":
        """The rows of this state, then those of the others, all with the places of the longest."""
        states = [self, *others]
        n = max(each.v.shape[2] for each in states)
        focus, v, length = zip(
            *((*_widened(x.focus, x.v, n), x.length) for x in states), strict=True
        )
        return self.made_of(torch.cat(focus), torch.cat(v), self.sizes()[2], torch.cat(length))

    def reserve(self) -> "WindowState":
        """The same with all places of its window, which tokens to come do not change in number."""
        focus, v = _widened(self.focus, self.v, self.sizes()[2] - 1)
        return replace(self, focus=focus, v=v, room=None)

    def filled(self) -> Bool[Tensor, "b w"]:
        """Which places hold a token."""
        kept = self.v.shape[2]
        return torch.arange(kept, device=self.v.device) >= kept - self.length.unsqueeze(1)

    def elements(self) -> tuple[Tensor, Tensor, Tensor]:
        """The past as the kernel takes it: token by token, those not yet there with weight 0."""
        return self.focus, self.v, torch.ones_like(self.focus)


def mask_focus(focus: Tensor, key_mask: Tensor | None) -> Tensor:
    """`focus` with weight 0 at pads; the mask `[b, t]` or `[b, 1, t]`."""
    if key_mask is None:
        return focus
    return focus.masked_fill(~key_mask.reshape(focus.shape[0], 1, focus.shape[2]), -torch.inf)


def _widened(focus: Tensor, v: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Both with `n` places, those added to the left without a token."""
    more = n - v.shape[2]
    if not more:
        return focus, v
    return F.pad(focus, (more, 0), value=-torch.inf), F.pad(v, (0, 0, more, 0))


def _append(old: Tensor, new: Tensor, n: int) -> Tensor:
    """The last `n` tokens of `old` and then `new`."""
    n_old, t = old.shape[2], new.shape[2]
    last = new[:, :, max(t - n, 0) :].to(old.dtype)
    # In training the graph holds on to all tokens anyway; else a copy lets go of a long prompt.
    if t >= n and last.requires_grad:
        return last
    return torch.cat([old[:, :, n_old - max(n - t, 0) :], last], dim=2)


def _pick(old: Tensor, new: Tensor, places: Tensor) -> Tensor:
    """The tokens at `places` `[b, k]` of `old` and then `new`, `[b, h, t, ...]`."""
    n_old = old.shape[2]
    if n_old == 0 or new.shape[2] == 0:
        return _at(new if n_old == 0 else old, places).to(old.dtype)
    is_old = (places < n_old).reshape(len(places), 1, -1, *[1] * (old.ndim - 3))
    from_old = _at(old, places.clamp_max(n_old - 1))
    from_new = _at(new, (places - n_old).clamp_min(0))
    return torch.where(is_old, from_old, from_new.to(old.dtype))


def _at(x: Tensor, places: Tensor) -> Tensor:
    """The tokens of `x` `[b, h, t, ...]` at `places` `[b, k]`, each copied whole."""
    b, h, t = x.shape[:3]
    row = torch.arange(b * h, device=x.device).view(b, h, 1)
    index = row * t + places.unsqueeze(1)
    return x.flatten(0, 2).index_select(0, index.flatten()).view(*index.shape, *x.shape[3:])
