"""Set-up of `transformers.Trainer`: the recipe, the run folder, the run.

There is no training loop here. What is trained, and on what, is the tasks' affair.
"""

from leap.training.clock import now
from leap.training.fit import (
    Fitted,
    Measure,
    check_fit,
    fit,
    processes,
    quiet,
    whole_batches,
)
from leap.training.folder import RunFolder
from leap.training.recipe import DeviceName, Recipe
from leap.training.run import PeakBytes, Work, save_weights, train_run
from leap.training.size import check_size

__all__ = [
    "DeviceName",
    "Fitted",
    "Measure",
    "PeakBytes",
    "Recipe",
    "RunFolder",
    "Work",
    "check_fit",
    "check_size",
    "fit",
    "now",
    "processes",
    "quiet",
    "save_weights",
    "train_run",
    "whole_batches",
]
