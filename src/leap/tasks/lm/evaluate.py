"""How well a model predicts a text: perplexity per token and per word, and bits per byte.

    perplexity per token = exp(sum_i -log p(token_i | what is seen before it) / tokens)

and per word or bits per byte by the count of words or bytes instead: these do not depend on the
tokenizer. Each token of the text is foretold exactly once, the first one after an end of text.
What is seen before it is up to a window's length, or, statefully, the whole text so far.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from leap.errors import ConfigError, FileError, InputError, refuse_given
from leap.layers.equalise import equalised
from leap.reports.files import write_json
from leap.reports.progress import Progress, Status, silent
from leap.tasks.lm.data import TextRead, count_bytes, count_words, read_corpus
from leap.tasks.lm.model import load_model, max_length
from leap.tasks.lm.tokenizer import TextTokenizer

IGNORED = -100
LONGEST_DEFAULT = 1024
"""Length of a window, or of a chunk, where neither config nor model say anything."""
MEAN_OVER = 32_768
"""Tokens of held-out text over which the mean of a learned part is taken."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Measure how well a model predicts a text: perplexity per token, per word, bits per byte."""

    run: Path
    """Run folder of leap lm train, or a folder with a Hugging Face model."""
    data: str | None = None
    """Text: what leap lm train takes; by default the Python library of this machine."""
    part: str = "test"
    """Part of the text: train, valid or test; all of it with whole."""
    length: int | None = None
    """Tokens seen at once; by default as many as in training."""
    stride: int | None = None
    """Tokens between the starts of two windows, at most the length, which is the default. Smaller
    ones give each token more context, and take longer."""
    stateful: bool = False
    """Carry the state over the whole text, so that each token has seen all before it."""
    batch: int = 4
    """Windows computed at once."""
    equalise: Literal["proportions", "gates"] | None = None
    """Hold proportions (or steps) or gates at their mean over held-out text: what the score loses
    is what their variation between tokens is worth. By default nothing is held."""
    output: Path | None = None
    """JSON file to write the results to; by default they are only shown."""

    def __post_init__(self) -> None:
        if self.stateful and self.stride is not None:
            raise ConfigError("stateful and stride: a state sees the whole text; drop one of them")
        if self.stateful:
            refuse_given(self, ("batch",), "of windows, and with stateful there are none")


@dataclass(frozen=True)
class Stretch:
    """The tokens from `start` to `end` of a text that was read as one."""

    start: int
    end: int
    nats: float

    @property
    def perplexity(self) -> float:
        """Per token."""
        return perplexity_of(self.nats / (self.end - self.start))


@dataclass(frozen=True)
class Score:
    """What was measured."""

    tokens: int
    words: int
    bytes: int
    nats: float
    """Sum of -log p over the tokens."""
    stretches: tuple[Stretch, ...] = ()
    """Statefully, the text in parts, each as long as all before it: whether what was read long
    ago still helps, or harms."""

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """Per token."""
        return perplexity_of(self.nats / self.tokens)

    @property
    def word_perplexity(self) -> float:
        """Per word, line ends counted as words."""
        return perplexity_of(self.nats / self.words)

    @property
    def bits_per_byte(self) -> float:
        """Of the text in UTF-8."""
        return self.nats / math.log(2) / self.bytes

    def to_json(self) -> dict[str, Any]:
        """All of it by name."""
        return asdict(self) | {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "word_perplexity": self.word_perplexity,
            "bits_per_byte": self.bits_per_byte,
            "stretches": [asdict(x) | {"perplexity": x.perplexity} for x in self.stretches],
        }


def evaluate(
    config: EvalConfig,
    progress: Progress = silent,
    read: TextRead | None = None,
) -> Score:
    """Score the text of a config with the model of a config."""
    if config.output is not None:
        _check_output(config.output)
    model, tokenizer = load_model(config.run)
    corpus = read_corpus(config.data)
    if read is not None:
        read(corpus)
    if config.part == "whole":
        documents = [*corpus.train, *corpus.valid, *corpus.test]
    else:
        documents = list(corpus.part(config.part))
    with (
        nullcontext()
        if config.equalise is None
        else equalise(model, tokenizer, list(corpus.valid), config.equalise)
    ):
        found = score(
            model,
            tokenizer,
            documents,
            length=config.length,
            stride=config.stride,
            stateful=config.stateful,
            batch=config.batch,
            progress=progress,
        )
    if config.output is not None:
        write_json(config.output, found.to_json())
    return found


def equalise(
    model: PreTrainedModel, tokenizer: TextTokenizer, documents: list[str], part: str
) -> AbstractContextManager[None]:
    """Hold a learned part of a model at its mean over the first tokens of a text."""
    length = int(getattr(model.config, "n_positions", LONGEST_DEFAULT))
    tokens = tokenizer.encode_documents(documents)[:MEAN_OVER].to(model.device).long()
    windows = tokens[: len(tokens) // length * length].view(-1, length)
    texts = windows.split(4) if len(windows) else (tokens[None],)

    def read() -> None:
        model.eval()
        for text in texts:
            model(input_ids=text, use_cache=False)

    return equalised(model, part, read)


def _check_output(path: Path) -> None:
    if path.is_dir():
        raise FileError(f"{path} is a folder; give a file to write the results to")
    if not path.parent.is_dir():
        raise FileError(f"no folder {path.parent} to write {path.name} to; make it first")


@torch.no_grad()
def score(
    model: PreTrainedModel,
    tokenizer: TextTokenizer,
    documents: list[str],
    *,
    length: int | None = None,
    stride: int | None = None,
    stateful: bool = False,
    batch: int = 4,
    progress: Progress = silent,
) -> Score:
    """Score a text.

    Args:
        model: any causal language model; set to evaluation.
        tokenizer: the model's own.
        documents: the text.
        length: tokens a window shows, or, statefully, that are read at once.
        stride: tokens between the starts of two windows; the length by default.
        stateful: carry the state over all of the text. The length then changes nothing but speed.
        batch: windows computed at once.
        progress: told how far the work is.
    """
    limit = max_length(model)
    if length is None:
        length = int(getattr(model.config, "n_positions", LONGEST_DEFAULT))
    if stride is None:
        stride = length
    if min(length, batch) < 1 or not 1 <= stride <= length:
        raise ConfigError(
            f"length={length}, stride={stride}, batch={batch}: give 1 or more for each, "
            "and a stride no longer than the length"
        )
    tokens = tokenizer.encode_documents(documents).to(model.device).long()
    words, n_bytes = count_words(documents), count_bytes(documents)
    if not words:
        raise InputError("there are no words in this text; give one that has some")
    if limit is not None and length > limit:
        raise ConfigError(
            f"length={length} is beyond the {limit} positions this model has learned; "
            f"give {limit} or less"
        )
    if stateful and limit is not None and len(tokens) > limit:
        raise ConfigError(
            f"this model has learned {limit} positions and cannot carry its state over "
            f"{len(tokens)} tokens; drop stateful, or train with position_embedding alibi or none"
        )
    # An end of text before it all, so that the first token can be foretold too.
    text = torch.cat([tokens.new_tensor([tokenizer.eos_id]), tokens])
    model.eval()
    parts = (
        _stateful(model, text, length) if stateful else _windows(model, text, length, stride, batch)
    )
    done, nats = [0], [0.0]
    for end, part in parts:
        done.append(end)
        nats.append(nats[-1] + part)
        progress(Status(end, len(tokens), "tokens"))
    stretches = _stretches(done, nats) if stateful else ()
    return Score(len(tokens), words, n_bytes, nats[-1], stretches)


def _stretches(done: list[int], nats: list[float]) -> tuple[Stretch, ...]:
    """Cut where twice as much was read as at the last cut, from sums at some points."""
    cuts = [0, 1]
    while 2 * cuts[-1] < len(done) - 1:
        cuts.append(2 * cuts[-1])
    if cuts[-1] != len(done) - 1:
        cuts.append(len(done) - 1)
    return tuple(Stretch(done[a], done[b], nats[b] - nats[a]) for a, b in pairwise(cuts))


def _windows(
    model: PreTrainedModel, text: Tensor, length: int, stride: int, batch: int
) -> Iterator[tuple[int, float]]:
    """How many tokens are scored so far, and the nats of those just scored.

    A window scores the tokens that none before it did: the first one all it shows, each other one
    its last `stride`, and the very last what remains.
    """
    n = len(text) - 1  # Tokens to foretell.
    ends = [min(length, n)]
    while ends[-1] < n:
        ends.append(min(ends[-1] + stride, n))
    scored = [0, *ends[:-1]]
    windows = [(max(0, end - length), done, end) for done, end in zip(scored, ends, strict=True)]
    for first in range(0, len(windows), batch):
        group = windows[first : first + batch]
        # All but a first window that is also the last are equally long.
        inputs = torch.stack([text[start:end] for start, _, end in group])
        targets = torch.stack([text[start + 1 : end + 1] for start, _, end in group]).clone()
        for row, (start, done, _) in enumerate(group):
            targets[row, : done - start] = IGNORED
        yield group[-1][2], _nats(model, inputs, targets)


def _stateful(model: PreTrainedModel, text: Tensor, length: int) -> Iterator[tuple[int, float]]:
    past = None
    n = len(text) - 1
    for start in range(0, n, length):
        end = min(start + length, n)
        inputs, targets = text[None, start:end], text[None, start + 1 : end + 1]
        outputs = model(
            input_ids=inputs,
            labels=inputs,
            shift_labels=targets,
            num_items_in_batch=1,
            past_key_values=past,
            use_cache=True,
        )
        past = outputs.get("past_key_values")
        if past is None:
            raise ConfigError(
                f"this model ({model.config.model_type}) gives no past_key_values to carry; "
                "drop stateful"
            )
        yield end, float(outputs.loss)


def _nats(model: PreTrainedModel, inputs: Tensor, targets: Tensor) -> float:
    outputs = model(
        input_ids=inputs,
        labels=inputs,
        shift_labels=targets,
        num_items_in_batch=1,
        use_cache=False,
    )
    return float(outputs.loss)


def perplexity_of(loss: float) -> float:
    """exp(loss), however large."""
    return math.exp(loss) if loss < 700 else math.inf
