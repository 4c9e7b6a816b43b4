"""Packed sequences: many of them end to end in one row, none seeing another.

    tokens      a a a b b c c c c c         cu_seqlens = [0, 3, 5, 10]

Sequences of like length are gathered into a padded batch, the op runs on it with a mask, and the
results go back to their places. Lengths in one batch differ by less than a factor of two, so at
most half of the work is for pads, in as many calls as there are such groups.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from leap.errors import InputError
from leap.ops.checks import shape
from leap.ops.state import Recurrent

R = TypeVar("R", bound=Recurrent)


def run_packed(
    op: Callable[..., tuple[Tensor, R]],
    cu_seqlens: Tensor,
    tokens: Mapping[str, Tensor | None],
    state: R | None,
    key_mask: Tensor | None = None,
) -> tuple[Tensor, R]:
    """Run a causal op on each packed sequence by itself.

    Args:
        op: called as `op(**tokens, state=state, key_mask=mask)` on a padded batch.
        cu_seqlens: where each sequence begins, and where the last one ends, `[n + 1]`.
        tokens: what the op takes, each `[1, h, t, ...]`, by name.
        state: of `n` rows, one per sequence, or None.
        key_mask: pads inside the sequences, `[1, t]`, or None.

    Returns:
        The op's output `[1, h, t, ...]` and a state of `n` rows.
    """
    given = {name: x for name, x in tokens.items() if x is not None}
    first = next(iter(given.values()))
    starts = check_cu_seqlens(cu_seqlens, first)
    groups: dict[int, list[int]] = defaultdict(list)
    for i, (begin, end) in enumerate(pairwise(starts)):
        groups[(end - begin).bit_length()].append(i)

    device = first.device
    outputs, places, states, rows = [], [], [], []
    for members in groups.values():
        start = torch.tensor([starts[i] for i in members], device=device)
        length = torch.tensor([starts[i + 1] - starts[i] for i in members], device=device)
        step = torch.arange(int(length.max()), device=device)
        real = step < length[:, None]
        place = (start[:, None] + step).where(real, 0)

        batch = {name: x[0][:, place].transpose(0, 1) for name, x in given.items()}
        index = torch.tensor(members, device=device)
        mask = real if key_mask is None else real & key_mask[0][place]
        before = None if state is None else state.select(index)
        o, after = op(**batch, state=before, key_mask=mask)
        outputs.append(o.transpose(0, 1)[:, real])
        places.append(place[real])
        states.append(after)
        rows.append(index)

    back = torch.cat(places).argsort()
    order = torch.cat(rows).argsort()
    return torch.cat(outputs, dim=1)[:, back][None], states[0].concat(states[1:]).select(order)


def check_cu_seqlens(cu_seqlens: Tensor, x: Tensor) -> list[int]:
    """The boundaries as a list, after making sure that they cut up exactly the tokens of `x`."""
    if x.shape[0] != 1:
        raise InputError(
            f"cu_seqlens packs sequences in one row, but the batch is {x.shape[0]}; "
            "reshape the inputs to [1, heads, all tokens, width]"
        )
    if cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point() or len(cu_seqlens) < 2:
        raise InputError(
            f"cu_seqlens is {shape(cu_seqlens)} of {cu_seqlens.dtype}; expected integers [n + 1], "
            "say [0, 3, 5] for sequences of 3 and 2 tokens"
        )
    starts: list[int] = cu_seqlens.tolist()
    if starts[0] != 0 or starts[-1] != x.shape[2] or sorted(starts) != starts:
        raise InputError(
            f"cu_seqlens={starts} does not cut {x.shape[2]} tokens into sequences; "
            f"it must rise from 0 to {x.shape[2]}"
        )
    return starts
