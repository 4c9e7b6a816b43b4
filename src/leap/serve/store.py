"""A bounded store of states, that lets go of the one that was used longest ago."""

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Store(Generic[K, V]):
    """Values by their keys, of a limited number of bytes in all; for several threads.

    Args:
        limit: bytes. A value that is larger by itself is not kept.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.n_bytes = 0
        self._kept: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, key: K, value: V, n_bytes: int) -> bool:
        """Whether it was kept."""
        with self._lock:
            self._drop(key)
            if n_bytes > self.limit:
                return False
            self._kept[key] = value, n_bytes
            self.n_bytes += n_bytes
            while self.n_bytes > self.limit:
                self._drop(next(iter(self._kept)))
            return True

    def get(self, key: K) -> V | None:
        """The value, which is then the one used last; None if it is not there."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def drop(self, key: K) -> bool:
        """Whether there was one to forget."""
        with self._lock:
            return self._drop(key)

    def __len__(self) -> int:
        return len(self._kept)

    def _drop(self, key: K) -> bool:
        if key not in self._kept:
            return False
        _, n_bytes = self._kept.pop(key)
        self.n_bytes -= n_bytes
        return True
