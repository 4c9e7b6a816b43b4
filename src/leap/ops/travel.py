"""Places that are travelled: each token takes a step forward, and stands where its steps led to.

    P_t = P_{t-1} + d_t                          d_t >= 0: the step of token t
    w_ij = 1/2 + 1/(2m) sum_n cos(omega_n (P_i - P_j))        in [0, 1], 1 at the same place

A place needs no length, and a distance between places is 0 for tokens that took no step. Each
frequency omega_n is the hand of a clock, whose angle omega_n P_t is all that is kept of a place: a
whole turn changes nothing, so angles are kept modulo 2 pi, and in double precision never drift.

As a dot product w_ij = x_i . y_j with x = y = clock(angle), the weight is a re-weighting of rank
1 + 2m for `leap.ops.causal_linear_attention`. A step of one token's length makes a wave of fixed
frequency; places divided by the last one are LeaPformer's proportions, and with steps of one length
cosFormer's.

Related: contextual position encoding (Golovneva et al. 2024, arXiv 2405.18719) counts tokens by
gates in softmax attention; Selective RoPE (Movahedi et al. 2025, arXiv 2511.17388) turns each pair
of channels by angles that tokens choose.

Axes: b batch, h heads, t tokens, m clocks, f features, r = 1 + 2m.
"""

import math
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leap.errors import InputError
from leap.ops.checks import shape
from leap.ops.packing import run_packed
from leap.ops.state import Recurrent, count_tokens, finest, mask_tokens, state

TURN = 2 * math.pi


@state
class ClockState(Recurrent):
    """How far tokens have travelled that are not read themselves: queries of another sequence."""

    angle: Float[Tensor, "b h m"]

    @classmethod
    def empty(cls, turn: Float[Tensor, "b h t m"]) -> "ClockState":
        """Before the first token, for steps like these."""
        b, h, _, m = turn.shape
        return cls(
            turn.new_zeros(b, h, m, dtype=finest(turn.device)),
            length=torch.zeros(b, dtype=torch.long, device=turn.device),
        )

    def advance(
        self,
        *,
        turn: Float[Tensor, "b h t m"],
        key_mask: Bool[Tensor, "b t"] | Bool[Tensor, "b 1 t"] | None = None,
    ) -> "ClockState":
        """The state after tokens that turn clocks so far, pads not counted."""
        _, angle = travelled(turn, self.angle, key_mask)
        length = self.length + count_tokens(turn, key_mask)
        after = replace(self, angle=angle, length=length, trail=None)
        if self.trail is None:
            return after
        if key_mask is None:
            key_mask = torch.ones(len(turn), turn.shape[2], dtype=torch.bool, device=turn.device)
        mask = key_mask if key_mask.ndim == 3 else key_mask.unsqueeze(1)
        return after.after(self, turn=turn, key_mask=mask)

    def merge(self, later: "ClockState") -> "ClockState":
        """The state after A then B, from the state after A and the one after B alone."""
        _, angle = travelled(later.angle.unsqueeze(2), self.angle)
        return replace(self, angle=angle, length=self.length + later.length, trail=None)


def travelled(
    turn: Float[Tensor, "b h t m"],
    angle: Float[Tensor, "b h m"] | None = None,
    key_mask: Bool[Tensor, "b t"] | Bool[Tensor, "b 1 t"] | None = None,
) -> tuple[Float[Tensor, "b h t m"], Float[Tensor, "b h m"]]:
    """Where clocks stand at each token, and after the last one, modulo a turn.

    Args:
        turn: how far each token turns them on.
        angle: where they stood before; at 0 by default.
        key_mask: true at real tokens; pads take no step.
    """
    exact = finest(turn.device)
    angles = mask_tokens(turn.to(exact), key_mask).cumsum(2)
    if angle is not None:
        if angle.shape != (*turn.shape[:2], turn.shape[3]):
            b, h, _, m = turn.shape
            raise InputError(f"the state's angle is {shape(angle)}; expected [{b}, {h}, {m}]")
        angles = angles + angle.to(exact).unsqueeze(2)
    if angles.shape[2]:
        last = angles[:, :, -1]
    else:
        last = turn.new_zeros(*turn.shape[:2], turn.shape[3], dtype=exact)
        last = last if angle is None else last + angle
    return angles, last.remainder(TURN)


def walked(
    turn: Float[Tensor, "b h t m"],
    state: ClockState | None = None,
    *,
    key_mask: Bool[Tensor, "b t"] | None = None,
    cu_seqlens: Int[Tensor, " n"] | None = None,
) -> tuple[Float[Tensor, "b h t m"], ClockState]:
    """Where clocks stand at each token, and the state to go on from.

    Args:
        turn: how far each token turns them on.
        state: what an earlier call returned; None at the start.
        key_mask: true at real tokens.
        cu_seqlens: where sequences packed into one row begin, and where the last one ends.
    """
    if cu_seqlens is not None:
        return run_packed(walked, cu_seqlens, {"turn": turn}, state, key_mask)
    before = ClockState.empty(turn) if state is None else state
    angles, _ = travelled(turn, before.angle, key_mask)
    return angles, before.advance(turn=turn, key_mask=key_mask)


def clock(
    angle: Float[Tensor, "*rows m"], dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*rows r"]:
    """[1, cos, sin, cos, sin, ...] / sqrt(2), hands over sqrt(m): x with x_i . x_j = w_ij."""
    m = angle.shape[-1]
    hands = torch.stack([angle.cos(), angle.sin()], dim=-1).flatten(-2) / math.sqrt(m)
    # A hair more than 1: rounded, hands that point apart would else make scores below 0.
    centre = math.sqrt(1 + 8 * torch.finfo(dtype).eps)
    centred = torch.cat([torch.full_like(hands[..., :1], centre), hands], dim=-1)
    return (centred / math.sqrt(2)).to(dtype)


def turned_on(
    x: Float[Tensor, "b h f *e"], angle: Float[Tensor, "b h m"]
) -> Float[Tensor, "b h f *e"]:
    """Sums over keys that began at 0 as if they had begun at an angle: their clocks turned on."""
    m = angle.shape[-1]
    centre, *hands = x.unflatten(2, (1 + 2 * m, -1)).unbind(2)
    shaped = angle.to(x.dtype).reshape(*angle.shape, *[1] * (centre.ndim - 2))
    cos, sin = shaped.cos(), shaped.sin()
    turned = [centre]
    for i in range(m):
        c, s = hands[2 * i], hands[2 * i + 1]
        turned += [c * cos[:, :, i] - s * sin[:, :, i], s * cos[:, :, i] + c * sin[:, :, i]]
    return torch.stack(turned, dim=2).flatten(2, 3)
