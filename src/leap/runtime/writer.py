"""Writing with an exported language model, each token at the same cost.

    writer = Writer("exported/play")
    begun = writer.read("Once upon a time")            read once, gone on from as often as wanted
    for seed in range(3):
        print(writer.generate(", there", past=begun, seed=seed).text)

What was read is a value: to keep it is a snapshot, and to go on from it twice is a fork.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from leap.errors import ConfigError, FileError, InputError, check_seed
from leap.runtime.graph import Array, Graph, Tensors, empty_state
from leap.runtime.manifest import AGAIN, read_manifest
from leap.runtime.states import read_state, write_state
from leap.runtime.text import Continuation, TextCodec, check_prompt, read_tokenizer

LM_TAG = "leap.lm"
"""The entry of a state file's metadata that says how its text goes on."""
RANDOM = "random.numpy"
"""Name of the tensor that holds the state of the random numbers, as JSON in bytes."""
PROGRESS = "progress.n_tokens"

Write = Callable[[str], None]
"""Takes the text in pieces, as they are made."""


@dataclass(frozen=True)
class Past:
    """What was read: a value, which nothing changes."""

    states: Tensors
    n_tokens: int = 0
    unread: tuple[int, ...] = ()
    """Tokens that come next, and are to be read before anything else."""
    random: Any = None
    """Where the random numbers of a generated text have come to."""

    @property
    def n_rows(self) -> int:
        """How many texts were read side by side."""
        return len(next(iter(self.states.values())))

    @property
    def n_bytes(self) -> int:
        """Memory that the state takes."""
        return sum(x.nbytes for x in self.states.values())

    def select(self, rows: Sequence[int]) -> "Past":
        """Some of the rows, in the given order; a row may come many times."""
        return replace(self, states={name: x[list(rows)] for name, x in self.states.items()})


@dataclass(frozen=True)
class Generated:
    """What was written, and what to go on from."""

    text: str
    tokens: list[int]
    seconds: float
    """From the first token, after the prompt was read, to the last."""
    past: Past


class Writer:
    """An exported language model.

    Args:
        folder: what `leap export` made.
        threads: how many to compute with; one is the fastest for small models.
    """

    def __init__(self, folder: str | Path, *, threads: int = 1) -> None:
        self.folder = Path(folder)
        self.manifest = manifest = read_manifest(self.folder, "lm")
        self._graph = Graph(self.folder, manifest, "step", threads)
        told = manifest.tokenizer
        try:
            self.codec = TextCodec(read_tokenizer(self.folder / told["file"]), int(told["end"]))
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(f"{self.folder} does not tell its tokenizer ({error!r})") from error
        if self.codec.fingerprint != told.get("fingerprint"):
            raise FileError(f"the tokenizer in {self.folder} is not the model's own; {AGAIN}")

    def empty(self, rows: int = 1) -> Past:
        """Nothing read yet; an end of text, after which a new one begins, is to be read first."""
        return Past(empty_state(self.manifest.states, rows), unread=(self.codec.eos_id,))

    def logits(
        self, tokens: Array, past: Past, at: Sequence[int] | None = None
    ) -> tuple[Array, Past]:
        """Read tokens `[rows, n]`, any number: logits `[rows, k, vocabulary]`, and the past.

        Args:
            tokens: those of each row; what the past has unread does not come into it.
            past: to go on from.
            at: for which of the tokens to give logits; by default the last.
        """
        n, limit = tokens.shape[1], self.manifest.n_positions
        if not n:
            raise InputError("there is no token to read; give one or more")
        if limit is not None and past.n_tokens + n > limit:
            raise ConfigError(
                f"{past.n_tokens} tokens read and {n} more are more than the {limit} positions "
                "this model has learned; use a shorter text, or a model with position_embedding "
                "alibi or none, which know no limit"
            )
        wanted = np.array([n - 1] if at is None else at, np.int64)
        found, states = [], past.states
        for start in range(0, n, self.manifest.at_once):
            part = np.ascontiguousarray(tokens[:, start : start + self.manifest.at_once], np.int64)
            here = wanted[(wanted >= start) & (wanted < start + part.shape[1])] - start
            (logits,), states = self._graph.run(states, tokens=part, at=here)
            found.append(logits)
        after = Past(states, past.n_tokens + n, random=past.random)
        return found[0] if len(found) == 1 else np.concatenate(found, axis=1), after

    def read(self, text: str, past: Past | None = None) -> Past:
        """Read a text, as a prefix that continuations share."""
        check_prompt(text)
        past = self.empty() if past is None else past
        tokens = [*past.unread, *self.codec.tokens(text).tolist()]
        # The last one is left for whoever goes on, who needs what it predicts.
        if len(tokens) > 1:
            _, past = self.logits(np.array([tokens[:-1]] * past.n_rows), past, at=())
        return replace(past, unread=tuple(tokens[-1:]))

    def generate(
        self,
        prompt: str = "",
        *,
        tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int | None = None,
        past_end: bool = False,
        past: Past | None = None,
        write: Write | None = None,
    ) -> Generated:
        """Write on after a prompt.

        Args:
            prompt: text to continue.
            tokens: how many to write at most.
            temperature: 0 is greedy decoding, 1 samples from the model's distribution.
            top_k: choose among the k likeliest tokens only.
            top_p: choose among the likeliest tokens that together have this probability.
            seed: of the choices; by default 0, or where the past's random numbers left off.
            past_end: go on with a new text where one ends.
            past: what was read before; nothing by default.
            write: told the text as soon as a token completes it.
        """
        check_prompt(prompt)
        choose = Sampler(temperature, top_k, top_p)
        check_seed(seed)
        if tokens < 1:
            raise ConfigError(f"tokens={tokens} must be 1 or more")
        past = self.empty() if past is None else past
        if past.n_rows != 1:
            raise InputError(f"the past has {past.n_rows} rows; select one to go on from")
        random = np.random.default_rng(0 if seed is None else seed)
        if seed is None and past.random is not None:
            random.bit_generator.state = past.random
        new = [*past.unread, *self.codec.tokens(prompt).tolist()]
        if not new:
            raise InputError("this past does not say how its text goes on; give a prompt")
        self._check_length(past.n_tokens + len(new), tokens)
        ends = self.codec.spells_line_ends and not past_end
        text = Continuation(self.codec, prompt, new)
        written: list[int] = []
        pieces: list[str] = []
        first = last = 0.0
        while True:
            logits, past = self.logits(np.array([new]), past)
            new = [choose(logits[0, -1], random)]
            last = time.perf_counter()
            first = first or last
            written += new
            piece = text.take(new[0])
            if piece:
                pieces.append(piece)
                if write is not None:
                    write(piece)
            if len(written) >= tokens or (ends and new[0] == self.codec.eos_id):
                break
        past = replace(past, unread=(written[-1],), random=random.bit_generator.state)
        return Generated("".join(pieces), written, last - first, past)

    def save(self, path: str | Path, past: Past) -> None:
        """Write what was read to a file, for `load` or the torch model to go on from."""
        if not past.n_tokens:
            raise InputError("nothing has been read yet; there is no state to save")
        tensors = {**past.states, PROGRESS: np.array(past.n_tokens)}
        if past.random is not None:
            tensors[RANDOM] = np.frombuffer(json.dumps(past.random).encode(), np.uint8)
        kept = {"tokenizer": self.codec.fingerprint, "unread": list(past.unread)}
        write_state(Path(path), self.manifest, tensors, {LM_TAG: json.dumps(kept)})

    def load(self, path: str | Path) -> Past:
        """What `save`, or the torch model, wrote to a file."""
        found, metadata = read_state(Path(path), self.manifest)
        try:
            kept = json.loads(metadata.get(LM_TAG, "{}"))
            unread = tuple(int(token) for token in kept.get("unread", ()))
            n_tokens = int(found[PROGRESS])
            random = json.loads(found[RANDOM].tobytes()) if RANDOM in found else None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FileError(f"{path} does not say how its text goes on ({error!r})") from error
        if not all(0 <= token < self.manifest.vocabulary for token in unread):
            raise FileError(f"{path} goes on from a token that there is not; give another")
        if kept.get("tokenizer", self.codec.fingerprint) != self.codec.fingerprint:
            raise FileError(f"{path} was written with another tokenizer; give its own model")
        states = {each.name: found[each.name] for each in self.manifest.states}
        return Past(states, n_tokens, unread, random)

    def _check_length(self, n_before: int, n_new: int) -> None:
        limit = self.manifest.n_positions
        if limit is not None and n_before + n_new - 1 > limit:
            raise ConfigError(
                f"{n_before} tokens read and {n_new} to write are more than the {limit} positions "
                "this model has learned; use a shorter prompt, or fewer tokens, or a model with "
                "position_embedding alibi or none, which know no limit"
            )


@dataclass(frozen=True)
class Sampler:
    """How a token is chosen by the logits of all."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature={self.temperature} must be 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k} must be 1 or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must be more than 0, and at most 1")

    def __call__(self, logits: Array, random: np.random.Generator) -> int:
        """One token."""
        if not self.temperature:
            return int(logits.argmax())
        p = self.probabilities(logits)
        # By the inverse of the distribution function: one random number per token, whatever is cut.
        return int(np.searchsorted(np.cumsum(p), random.random() * p.sum(), side="right"))

    def probabilities(self, logits: Array) -> Array:
        """Of each token, those that are cut off having none."""
        below = logits.astype(np.float64) - logits.max()  # First: nothing to divide is large then.
        with np.errstate(over="ignore"):  # Next to 0, all others are infinitely far below.
            p = np.exp(below / self.temperature)
        if self.top_k is not None and self.top_k < len(p):
            p[p < np.partition(p, -self.top_k)[-self.top_k]] = 0
        p /= p.sum()
        if self.top_p < 1:
            order = np.argsort(-p, kind="stable")
            before = np.cumsum(p[order]) - p[order]
            p[order[before >= self.top_p]] = 0
            p /= p.sum()
        return p
