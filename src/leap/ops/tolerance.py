"""How far the ops may be from the same formula in double precision, by the inputs' dtype.

Errors are the largest difference over the largest magnitude of the exact result, for lengths to
16,384. Sums, denominators and their gradients are kept in float32 at least, so what half precision
loses is little more than the rounding of its results: half a unit in the last place, 2^-9 for
bfloat16 and 2^-12 for float16. The tests hold every op to this table.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """Largest relative errors allowed."""

    output: float
    gradient: float


TOLERANCES = {
    torch.float64: Tolerance(output=1e-12, gradient=1e-11),
    torch.float32: Tolerance(output=2e-6, gradient=1e-5),
    torch.bfloat16: Tolerance(output=4e-3, gradient=8e-3),
    torch.float16: Tolerance(output=5e-4, gradient=1e-3),
}


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """The largest difference over the largest magnitude, the measure of the table."""
    actual, exact = actual.detach().double(), exact.detach().double()
    largest = exact.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    return float((actual - exact).abs().max() / largest)
