"""Set-up of `transformers.Trainer`: the recipe, the run folder, the run.

There is no training loop here. What is trained, and on what, is the tasks' affair.
"""

from leap.training.clock import now
from leap.training.fit import (
    Fitted,
    Measure,
    fit,
    processes,
    quiet,
    whole_batches,
)
from leap.training.folder import RunFolder
from leap.training.recipe import DeviceName, Recipe
from leap.training.run import PeakBytes, Work, save_weights, train_run

__all__ = [
    "DeviceName",
    "Fitted",
    "Measure",
    "PeakBytes",
    "Recipe",
    "RunFolder",
    "Work",
    "fit",
    "now",
    "processes",
    "quiet",
    "save_weights",
    "train_run",
    "whole_batches",
]
