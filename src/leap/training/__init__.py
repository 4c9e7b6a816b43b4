"""Set-up of `transformers.Trainer`: the recipe, the run folder, progress and learning curves.

There is no training loop here. What is trained, and on what, is the tasks' affair.
"""

from leap.training.clock import now
from leap.training.curve import plot_curves
from leap.training.fit import (
    Fitted,
    Measure,
    Progress,
    Status,
    fit,
    processes,
    quiet,
    whole_batches,
)
from leap.training.folder import RunFolder
from leap.training.recipe import DeviceName, Recipe

__all__ = [
    "DeviceName",
    "Fitted",
    "Measure",
    "Progress",
    "Recipe",
    "RunFolder",
    "Status",
    "fit",
    "now",
    "plot_curves",
    "processes",
    "quiet",
    "whole_batches",
]
