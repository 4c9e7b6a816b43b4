"""When to read on and when to write: policies, all behind one interface.

    wait-3/1, wait-5/4  3 source states ahead; 5 steps of 4 states ahead (pre-decision ratio 4)
    wait-3              the same, with the ratio that the model was trained with
    offline             everything is read first
    agree-2             what the last 2 hypotheses begin with in common (local agreement, LA-2)
    align-2             while the most attended chunk is not among the last 2 (AlignAtt)
    tail-0.3            while less than 0.3 of the attention is on the last 2 chunks (EDAtt)

A policy speaks only while the source goes on. Once it has ended, everything is written. And an end
that a model predicts before that is no end: it means that more has to be read.

States are those of the encoder: subwords of text, the source's end being one, or 40 or 80 ms of
sound.
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from leap.errors import ConfigError

Wait = int | Literal["offline"]
"""How many source states a model is ahead of the target, in steps of the ratio; or all."""


@dataclass(frozen=True)
class Policy(ABC):
    """Base of all policies."""

    @property
    @abstractmethod
    def name(self) -> str:
        """As `read_policy` reads it."""

    @property
    def drafts(self) -> int:
        """How many hypotheses must agree on what is written; 0 for a policy that makes none."""
        return 0

    @property
    def window(self) -> int:
        """How many of the last chunks it has to know the attention to; 0 for none."""
        return 0

    @property
    def too_new(self) -> int:
        """How many of the last chunks are too new to be relied on; 0 for a policy that does not
        look at the attention."""
        return 0

    @abstractmethod
    def may_write(self, n_read: int, n_written: int) -> bool:
        """Whether to write one more subword, after `n_read` states and `n_written` subwords."""

    def trusts(self, attention: Float[np.ndarray, "b window"]) -> Bool[np.ndarray, " b"]:
        """Whether subwords may stay that were found with this much attention to each of the last
        chunks, the newest first. Those of a policy that does not look at it always may."""
        return np.ones(len(attention), bool)

    def schedule(self, n_tokens: int, chunk_size: int) -> Int[np.ndarray, " t"] | None:
        """How many states each target token sees, to train for this policy; None for all."""
        raise ConfigError(
            f"{self.name} decides as it goes, so there is no schedule to train; train with many "
            "waits, or offline"
        )


@dataclass(frozen=True)
class WaitK(Policy):
    """Subword t (from 0) is written when ratio (t + wait) states have been read."""

    wait: int
    ratio: int = 1

    def __post_init__(self) -> None:
        if self.wait < 1 or self.ratio < 1:
            raise ConfigError(f"wait={self.wait} and ratio={self.ratio} must be 1 or more")

    @property
    def name(self) -> str:
        """wait-k/ratio, which means the same to whoever reads it."""
        return f"wait-{self.wait}/{self.ratio}"

    def may_write(self, n_read: int, n_written: int) -> bool:
        """Whether the schedule is that far."""
        return n_read >= self.ratio * (n_written + self.wait)

    def schedule(self, n_tokens: int, chunk_size: int) -> Int[np.ndarray, " t"] | None:
        """How many states each target token sees."""
        return wait_schedule(n_tokens, self.wait, self.ratio, chunk_size)


@dataclass(frozen=True)
class Offline(Policy):
    """Nothing is written before the source has ended."""

    @property
    def name(self) -> str:
        """`offline`, all there is to say of it."""
        return "offline"

    def may_write(self, n_read: int, n_written: int) -> bool:
        """Returns False: nothing is written while the source goes on."""
        return False

    def schedule(self, n_tokens: int, chunk_size: int) -> Int[np.ndarray, " t"] | None:
        """Returns None: each target token sees the whole source."""
        return wait_schedule(n_tokens, "offline", 1, chunk_size)


@dataclass(frozen=True)
class Adaptive(Policy):
    """A policy that looks at what the model does, and never has more subwords than states."""

    def may_write(self, n_read: int, n_written: int) -> bool:
        """Whether there are fewer subwords than states: without that, some models run away."""
        return n_written < n_read


@dataclass(frozen=True)
class LocalAgreement(Adaptive):
    """What the last n hypotheses, one after each chunk, begin with in common (LA-n)."""

    n: int = 2

    def __post_init__(self) -> None:
        if self.n < 2:
            raise ConfigError(f"n={self.n} hypotheses cannot agree; give 2 or more")

    @property
    def name(self) -> str:
        """agree-n."""
        return f"agree-{self.n}"

    @property
    def drafts(self) -> int:
        """The n hypotheses that must agree."""
        return self.n


@dataclass(frozen=True)
class AlignAtt(Adaptive):
    """Write while the most attended chunk is not among the last few.

    Args:
        chunks: how many are too new to be relied on.
        longest: chunks to look back for the most attended; all before them count as one, which has
            gone by.
    """

    chunks: int = 2
    longest: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.chunks < self.longest:
            raise ConfigError(f"chunks={self.chunks} must be 1 or more, and below {self.longest}")

    @property
    def name(self) -> str:
        """align-chunks."""
        return f"align-{self.chunks}"

    @property
    def window(self) -> int:
        """As far as it looks back."""
        return self.longest

    @property
    def too_new(self) -> int:
        """The chunks that are too new to be relied on."""
        return self.chunks

    def trusts(self, attention: Float[np.ndarray, "b window"]) -> Bool[np.ndarray, " b"]:
        """Whether the most attended chunk is older than those."""
        before = 1 - attention.sum(axis=1, keepdims=True)
        return np.concatenate([attention, before], axis=1).argmax(axis=1) >= self.chunks


@dataclass(frozen=True)
class TailMass(Adaptive):
    """Write while little of the attention is on the last few chunks (EDAtt).

    Args:
        share: of the attention that is too much.
        chunks: how many are the last few.
    """

    share: float = 0.3
    chunks: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1 or self.chunks < 1:
            raise ConfigError(
                f"share={self.share} is a share, above 0, and chunks={self.chunks} 1 or more"
            )

    @property
    def name(self) -> str:
        """tail-share."""
        return f"tail-{self.share:g}"

    @property
    def window(self) -> int:
        """The last few."""
        return self.chunks

    @property
    def too_new(self) -> int:
        """The last few chunks, whose share of the attention counts."""
        return self.chunks

    def trusts(self, attention: Float[np.ndarray, "b window"]) -> Bool[np.ndarray, " b"]:
        """Whether the last few chunks have less than the share."""
        return attention.sum(axis=1) < self.share


def wait_schedule(
    n_tokens: int, wait: Wait, ratio: int = 1, chunk_size: int = 1
) -> Int[np.ndarray, " t"] | None:
    """How many source states each of `n_tokens` target tokens sees; None for all.

    That is g(t) = ratio (t + wait), t from 0, and as states come by the chunk, up to the end of the
    one that is in.
    """
    if wait == "offline" or not chunk_size:
        return None
    wanted = ratio * (np.arange(n_tokens) + wait)
    return -(-wanted // chunk_size) * chunk_size


def waiting(wait: Wait, ratio: int = 1) -> Policy:
    """The policy of a wait, as training knows it."""
    return Offline() if wait == "offline" else WaitK(wait, ratio)


def read_policy(name: str, ratio: int = 1) -> Policy:
    """The policy of a name.

    Args:
        name: as above.
        ratio: of wait-k, where the name tells none.
    """
    if name == "offline":
        return Offline()
    if found := re.fullmatch(r"wait-(\d+)(?:/(\d+))?", name):
        return WaitK(int(found[1]), int(found[2] or ratio))
    if found := re.fullmatch(r"agree-(\d+)", name):
        return LocalAgreement(int(found[1]))
    if found := re.fullmatch(r"align-(\d+)", name):
        return AlignAtt(int(found[1]))
    if found := re.fullmatch(r"tail-(0?\.\d+|1)", name):
        return TailMass(float(found[1]))
    raise ConfigError(
        f"no policy is called {name!r}; there are wait-3 (wait-3/4 with a ratio), offline, "
        "agree-2, align-2 and tail-0.3, with any numbers"
    )
