"""The time, as it is told of every step and every look."""

import time

import torch


def now(device: torch.device) -> tuple[float, float]:
    """Wall and CPU time, once the device is done with what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter(), time.process_time()
