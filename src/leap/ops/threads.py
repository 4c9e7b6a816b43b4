"""Work whose pieces are too small to share out among threads.

An op that cuts its work to fit the cache makes hundreds of small matrices. Handed to all threads
one by one, each of them is done when the last thread is; and where other programs keep the cores
busy, that is when the system next gives it one: milliseconds, for microseconds of work.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class _OneThread:
    """A context in which torch uses one thread.

    The number is one for the whole process. Of calls that overlap, in several Python threads or
    inside each other, the first to begin takes it down and the last to end puts it back.
    """

    def __init__(self) -> None:
        self.lock, self.n_inside, self.n_before = threading.Lock(), 0, 1

    def __enter__(self) -> None:
        with self.lock:
            if not self.n_inside:
                self.n_before = torch.get_num_threads()
                torch.set_num_threads(1)
            self.n_inside += 1

    def __exit__(self, *_error: object) -> None:
        with self.lock:
            self.n_inside -= 1
            if not self.n_inside:
                torch.set_num_threads(self.n_before)


_one_thread = _OneThread()


def on_one_thread(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which what is computed of x, if on a processor, is by one thread."""
    return _one_thread if x.device.type == "cpu" else nullcontext()
