"""Translating with an exported model, while the source is still arriving.

    stream = Translator("exported/captions", "wait-3").stream()
    stream.push("A man in")        # the words that can be said by now
    stream.push(" an orange hat.")
    stream.finish()                # all the others; the stream is then as new

The words are those of the model in torch. For speech, `push` takes samples.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from leap.errors import ConfigError, FileError, InputError
from leap.runtime.fbank import FilterBank
from leap.runtime.graph import Array, Graph, Tensors, empty_state
from leap.runtime.manifest import AGAIN, read_manifest
from leap.runtime.states import read_state, write_state
from leap.runtime.streaming.policies import Offline, Policy, read_policy
from leap.runtime.streaming.stream import Interpreter, Stream, StreamPool
from leap.runtime.streaming.vocabulary import BOS, Subwords
from leap.runtime.text import read_tokenizer

KEPT = "stream."
"""What names of tensors begin with in a file of a stream that are not the model's."""


@dataclass(frozen=True)
class Arrays:
    """The states of some streams, a row for each, as values."""

    tensors: Tensors

    def select(self, rows: Sequence[int]) -> "Arrays":
        """Some of the rows, in the given order."""
        return Arrays({name: x[list(rows)] for name, x in self.tensors.items()})

    def concat(self, others: Iterable["Arrays"]) -> "Arrays":
        """The rows of these, then those of the others."""
        parts = [self, *others]
        try:
            return Arrays(
                {
                    name: np.concatenate([each.tensors[name] for each in parts])
                    for name in self.tensors
                }
            )
        except ValueError as error:
            raise InputError(
                "these streams keep states of different sizes, as softmax attention does; step "
                "them one by one"
            ) from error

    @property
    def n_bytes(self) -> int:
        """Memory they take."""
        return sum(x.nbytes for x in self.tensors.values())


class Translator(Interpreter):
    """An exported translation model with a policy.

    Args:
        folder: what `leap export` made.
        policy: or its name, where a wait has the ratio of the training, unless it says.
        chunk_size: states that are read at once, 0 for all; by default the fewest of the training,
            offline the most.
        threads: how many to compute with; one is the fastest for small models.
        like: another of the same folder, whose graphs it shares.
        options: longest, reset, beam and pauses, as of `Interpreter`.
    """

    def __init__(
        self,
        folder: str | Path,
        policy: str | Policy = "wait-3",
        *,
        chunk_size: int | None = None,
        threads: int = 1,
        like: "Translator | None" = None,
        **options: Any,
    ) -> None:
        self.folder = Path(folder)
        self.manifest = manifest = read_manifest(self.folder, ("text", "speech"))
        told = manifest.translation
        self._read: Graph = like._read if like else Graph(self.folder, manifest, "read", threads)
        self._write: Graph = like._write if like else Graph(self.folder, manifest, "write", threads)
        self.can_join = manifest.is_constant
        try:
            vocabulary = Subwords(read_tokenizer(self.folder / manifest.tokenizer["file"]))
            extractor = FilterBank(**told["sound"]) if manifest.task == "speech" else None
            if isinstance(policy, str):
                policy = read_policy(policy, told["ratio"])
            if not told["chunk_sizes"]:
                raise KeyError("chunk_sizes")
            if chunk_size is None:
                choose = max if isinstance(policy, Offline) else min
                chunk_size = choose(told["chunk_sizes"], key=lambda size: size or math.inf)
            super().__init__(
                vocabulary,
                policy,
                start=told.get("start", BOS),
                extractor=extractor,
                frames_per_state=told.get("frames_per_state", 1),
                chunk_size=chunk_size,
                language=told.get("source_language", "en"),
                **options,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise FileError(
                f"{self.folder} does not tell how its model reads ({error!r}); {AGAIN}"
            ) from error
        if len(vocabulary) != manifest.vocabulary:
            raise FileError(
                f"the model in {self.folder} knows {manifest.vocabulary} subwords, and its "
                f"tokenizer {len(vocabulary)}; {AGAIN}"
            )
        window, too_new = told.get("cross_window"), self.chunk_size * policy.too_new
        if window is not None and policy.too_new and window <= too_new:
            raise ConfigError(
                f"{policy.name} trusts nothing of the last {too_new} source states, and the model "
                f"sees no more than cross_window={window}; it would write nothing before the end"
            )
        self.blank = Arrays(empty_state(manifest.states))

    def read(self, chunk: Array, states: Arrays) -> Arrays:
        """Read one more chunk: subwords `[b, n]`, or frames `[b, n, bins]`."""
        if self.extractor is not None:
            b, n, bins = chunk.shape
            filled = np.pad(chunk, ((0, 0), (0, -n % self.frames_per_state), (0, 0)))
            chunk = filled.reshape(b, -1, self.frames_per_state * bins).astype(np.float32)
        size = chunk.shape[1]
        if self.manifest.translation.get("reads_in_parts"):
            size = min(size, self.manifest.at_once)
        tensors = states.tensors
        for start in range(0, chunk.shape[1], size):
            part = np.ascontiguousarray(chunk[:, start : start + size])
            before = {name: x for name, x in tensors.items() if start and name == "before.read"}
            _, tensors = self._read.run(tensors, source=part)
            tensors = {**tensors, **before}  # One chunk, however it is read.
        return Arrays(tensors)

    def logits(self, tokens: Array, states: Arrays) -> tuple[Array, Arrays, Array | None]:
        """Write tokens `[b, t]`: logits of what follows the last, states, attention before."""
        at = np.array([tokens.shape[1] - 1], np.int64)
        (logits, shares), after = self._write.run(
            states.tensors, tokens=tokens.astype(np.int64), at=at
        )
        window = self.policy.window
        return logits[:, -1], Arrays(after), shares[:, :window] if window else None

    def save(self, path: str | Path, states: Arrays, kept: Mapping[str, Array]) -> None:
        """Write a stream to a file, for `load` of the same model."""
        more = {KEPT + name: x for name, x in kept.items()}
        write_state(Path(path), self.manifest, {**states.tensors, **more}, {})

    def load(self, path: str | Path) -> Stream:
        """The stream that `Stream.save` wrote, to be gone on with."""
        found, _ = read_state(Path(path), self.manifest)
        row = self.row()
        try:
            row.restore(
                {name.removeprefix(KEPT): x for name, x in found.items() if name.startswith(KEPT)}
            )
        except (KeyError, IndexError, ValueError) as error:
            raise FileError(f"{path} holds no stream ({error!r})") from error
        states = Arrays({each.name: found[each.name] for each in self.manifest.states})
        return Stream(StreamPool(self, [row], states))
