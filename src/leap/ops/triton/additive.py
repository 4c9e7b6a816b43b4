"""Additive attention by Triton: see kernels/additive.py.

What surrounds the sum, ceilings and the division, is that of `leap.ops.additive.blocked`.

Axes: b batch, h heads, t tokens, k elements of the past, p values; n rows of b x h.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from leap.ops.additive import blocked
from leap.ops.derivatives import transformed
from leap.ops.triton.device import BLOCK, cut, has_tf32, interpreted, launch, power_of_two, refuses
from leap.ops.triton.packing import spans


def refusal(focus: Tensor, v: Tensor, *, is_named: bool) -> str | None:
    """Why the kernels do not take a call, or None if they do."""
    if transformed():
        return "it has no transforms of torch.func and no forward mode"
    return refuses((focus, v), is_named=is_named)


def summed(
    ceiling: Tensor,
    logit: Tensor,
    values: Tensor,
    mass: Tensor,
    window: int | None,
    skip: int,
    backwards: bool,
    cu_seqlens: Tensor | None = None,
) -> Iterator[tuple[slice, Tensor]]:
    """The sums as `blocked.gather` has them, of finite numbers, all rows at once.

    No sequence packed by `cu_seqlens` sees another.
    """
    sums = sum_up(ceiling, logit, values, mass, window, cu_seqlens, backwards=backwards)[:, skip:]
    yield slice(0, sums.shape[1]), sums


def sum_up(
    ceiling: Tensor,
    logit: Tensor,
    values: Tensor,
    mass: Tensor,
    window: int | None,
    cu_seqlens: Tensor | None,
    *,
    backwards: bool,
) -> Tensor:
    """What each row sees, `[n, t, p + 1]`."""
    import triton.language as tl

    from leap.ops.triton.kernels import additive

    ceiling, logit, values, mass = (x.contiguous() for x in (ceiling, logit, values, mass))
    n, t, p = values.shape
    size = 16 if interpreted() else BLOCK
    g, n_sequences, table, bounds = cut(t, size), 1, None, None
    if cu_seqlens is not None:
        found = spans(cu_seqlens, t, size)
        g, n_sequences = len(found.table), len(cu_seqlens) - 1
        table, bounds = found.table, found.bounds
    half = values.dtype in (torch.float16, torch.bfloat16)
    options: dict[str, Any] = {
        "P": p,
        "BT": size,
        "BP": min(64, max(16, power_of_two(p + 1))),
        "ACC": tl.float64 if logit.dtype == torch.float64 else tl.float32,
    }
    pieces = cut(p + 1, options["BP"])
    peaks, totals = logit.new_empty(n, g), logit.new_empty(n, g, p + 1)
    args = logit, values, mass, table, peaks, totals, t, g
    launch(additive.totals, (n * g, pieces), *args, BACKWARDS=backwards, **options)
    if window is None:
        own = peaks, totals, bounds
        peaks, totals = torch.empty_like(peaks), torch.empty_like(totals)
        given = {name: options[name] for name in ("P", "BP", "ACC")}
        grid = n * n_sequences, pieces
        launch(additive.before, grid, *own, peaks, totals, g, n_sequences, **given)
    sums = logit.new_empty(n, t, p + 1)
    launch(
        additive.sums,
        (n * g, pieces),
        *(ceiling, logit, values, mass, table, peaks, totals, sums, t, g, window or 0),
        WINDOWED=window is not None,
        BACKWARDS=backwards,
        PRECISION="tf32" if half and has_tf32() else "ieee",
        **options,
    )
    return sums


_gather = partial(blocked.gather, summed=summed)


@torch.library.custom_op("leap::triton_additive_attention", mutates_args=())
def attend(
    focus: Tensor,
    v: Tensor,
    mask: Tensor | None,
    past_focus: Tensor | None,
    past_v: Tensor | None,
    past_mass: Tensor | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `blocked.attend`."""
    return blocked.forward(_gather, focus, v, mask, past_focus, past_v, past_mass, window)


@torch.library.custom_op("leap::triton_additive_attention_backward", mutates_args=())
def attend_backward(
    do: Tensor,
    dn_last: Tensor | None,
    dz_last: Tensor | None,
    focus: Tensor,
    v: Tensor,
    mask: Tensor | None,
    past_focus: Tensor | None,
    past_v: Tensor | None,
    past_mass: Tensor | None,
    o: Tensor,
    peaks: Tensor,
    inverses: Tensor,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `blocked.attend_backward`."""
    saved = focus, v, mask, past_focus, past_v, past_mass, o, peaks, inverses
    return blocked.backward(_gather, do, dn_last, dz_last, *saved, window)


blocked.register(attend, attend_backward)
