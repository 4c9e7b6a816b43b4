"""How far a model remembers: a word at the start of a text, asked for after a long filler.

    filler ... MARK w filler ... MARK        the model is to go on with w

The filler is real text. In training, sequences have one length and the word stands anywhere in
them, and is asked for several times, so that every distance up to that length is met, short ones
early in a text most of all: it is those that models learn from first. Then it is asked for at far
longer ones, the state carried all the way. A model that guesses is right once in as many times as
there are words.

    results.json, results.md   the share of right answers by distance, one row per model
    recall.png                 the same as a picture
    <model>/                   the run folder of each
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel, set_seed

from leap.errors import ConfigError
from leap.reports.plots import Line
from leap.reports.progress import Progress, named, silent
from leap.reports.table import Table, markdown
from leap.tasks.lm.compare import folder_name, parse_model
from leap.tasks.lm.data import read_corpus
from leap.tasks.lm.memory import (
    IGNORED,
    Remembered,
    ask,
    build_unbounded,
    write_results,
)
from leap.tasks.lm.model import SizeConfig
from leap.tasks.lm.tokenizer import TextTokenizer, make_tokenizer
from leap.training import Recipe, RunFolder, check_fit, check_size, fit

MARK = 14
"""Byte before a word: a control character, which texts do not have. The words are those after."""
MOST_WORDS = 16
ASKS = 8
"""Times that a word is asked for in training, at the most."""
CHUNK = 2048
"""Tokens read at once when a word is asked for; it changes nothing but speed."""


@dataclass(frozen=True, kw_only=True)
class RecallConfig(Recipe, SizeConfig):
    """Measure how far models remember a word over a filler of real text.

    Models are trained to recall it within short texts, then asked over longer and longer ones.
    """

    models: tuple[str, ...] = ("leap:none", "leapformer:none", "leapformer:alibi", "softmax:rotary")
    """Models, by the short forms of leap lm compare; none of them with learned positions."""
    data: str | None = None
    """Filler: text, as for leap lm train; by default the Python library of this machine."""
    length: int = 256
    """Tokens in a sequence of training: the longest distance that is learned from."""
    distances: tuple[int, ...] = (64, 256, 1024, 4096, 16384, 65536)
    """Tokens between the word and the question."""
    words: int = 16
    """Different words there may be."""
    questions: int = 64
    """Questions at each distance."""
    n_layer: int | None = 4
    """Layers."""
    steps: int | None = 600
    """Optimiser steps."""
    batch: int = 16
    """Sequences in each step."""
    learning_rate: float = 2e-3
    """Peak learning rate of AdamW."""
    dropout: float | None = 0.0
    """Share of activations dropped in training."""
    output: Path = Path("runs/recall")
    """Folder for the table, the picture and a run folder for each model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.models or not self.distances:
            raise ConfigError("models or distances are empty; name at least one of each")
        if self.words > MOST_WORDS:
            raise ConfigError(f"words={self.words} must be {MOST_WORDS} or fewer")
        for name, least in (("length", 4), ("words", 2), ("questions", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be {least} or more")
        if min(self.distances) < 1:
            raise ConfigError(f"distances={self.distances}: give 1 or more for each")
        for model in self.models:
            parse_model(model)


class Questions(Dataset[dict[str, Tensor]]):
    """Sequences of `length` tokens in which a word is asked for, several times and in the end.

    Args:
        filler: tokens of a text.
        words: how many different words there are.
        length: of a sequence.
        count: how many sequences.
        seed: of everything that is drawn.
    """

    def __init__(self, filler: Tensor, words: int, *, length: int, count: int, seed: int) -> None:
        if len(filler) < length:
            raise ConfigError(f"the filler has {len(filler)} tokens, fewer than length={length}")
        self.filler = filler
        self.words, self.length, self.count, self.seed = words, length, count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + index)

        def number(bound: int) -> int:
            return int(torch.randint(bound, (), generator=draw))

        def any_size(bound: int) -> int:
            """From 1 to the bound, small and large alike: every doubling as often."""
            return int((bound + 1) ** float(torch.rand((), generator=draw)))

        start = number(len(self.filler) - self.length + 1)
        tokens = self.filler[start : start + self.length].long().clone()
        place, word = any_size(self.length - 2) - 1, MARK + 1 + number(self.words)
        left = self.length - place - 2
        # Mostly filler is to be left.
        asked = [-1, *(place + 1 + any_size(left) for _ in range(min(ASKS - 1, left // 8)))]
        tokens[place], tokens[place + 1], tokens[asked] = MARK, word, MARK
        answer = torch.full_like(tokens, IGNORED)
        answer[asked] = word
        return {"input_ids": tokens, "labels": tokens, "shift_labels": answer}


def recall(config: RecallConfig, progress: Progress = silent) -> list[Remembered]:
    """Train each model, ask it, and write the table; nothing is trained or asked twice."""
    tokenizer = make_tokenizer("bytes", None, [])
    for name in config.models:  # Before the text is read.
        build = partial(build_unbounded, name, config, tokenizer, config.length)
        check_size(build, config.device)
    corpus = read_corpus(config.data)
    filler = {part: tokenizer.encode_documents(corpus.part(part)) for part in ("train", "valid")}
    rows = []
    for name in config.models:
        rows.append(_one(config, name, tokenizer, filler, progress))
        _write(config, rows)
    return rows


def _one(
    config: RecallConfig,
    name: str,
    tokenizer: TextTokenizer,
    filler: dict[str, Tensor],
    progress: Progress,
) -> Remembered:
    settings = asdict(config) | {"model": name}
    for other in ("models", "distances", "output", "device"):
        settings.pop(other)
    folder = RunFolder(config.output / folder_name(name), settings)

    def accuracy(model: PreTrainedModel, distance: int) -> float:
        return accuracy_at(
            model,
            filler["valid"],
            config.words,
            distance=distance,
            questions=config.questions,
            seed=config.seed,
        )

    return ask(
        folder,
        name,
        config.distances,
        lambda: _trained(config, name, tokenizer, filler, folder, progress),
        accuracy,
    )


def _trained(
    config: RecallConfig,
    name: str,
    tokenizer: TextTokenizer,
    filler: dict[str, Tensor],
    folder: RunFolder,
    progress: Progress,
) -> PreTrainedModel:
    """The model with its training done, which goes on from wherever it was stopped."""
    set_seed(config.seed)
    model = build_unbounded(name, config, tokenizer, config.length)
    train, valid = (
        Questions(
            filler[part],
            config.words,
            length=config.length,
            count=count,
            seed=config.seed + offset,
        )
        for offset, (part, count) in enumerate((("train", 10**6), ("valid", 8 * config.batch)))
    )
    check_fit(model, train, config, folder)  # Before anything is written.
    folder.create({"filler": str(len(filler["train"]))})
    with folder.alone():
        fit(model, train, valid, config, folder, named(progress, name))
    return model


@torch.no_grad()
def accuracy_at(
    model: nn.Module,
    filler: Tensor,
    words: int,
    *,
    distance: int,
    questions: int,
    seed: int = 0,
) -> float:
    """Share of right answers after `distance` tokens of filler, the text read in chunks.

    A filler that is shorter than that is repeated.
    """
    model.eval()  # Any causal language model of Hugging Face's kind.
    device = next((x.device for x in model.parameters()), torch.device("cpu"))
    draw = torch.Generator().manual_seed(seed)
    right = 0
    for first in range(0, questions, 16):
        n = min(16, questions - first)
        answer = torch.randint(words, (n,), generator=draw) + MARK + 1
        start = torch.randint(len(filler), (n,), generator=draw)
        mark = torch.full((n, 1), MARK, device=device)
        past = model(
            input_ids=torch.cat([mark, answer[:, None].to(device)], dim=1), use_cache=True
        ).past_key_values
        for done in range(0, distance, CHUNK):
            at = start[:, None] + torch.arange(done, min(done + CHUNK, distance))
            past = model(
                input_ids=filler[at % len(filler)].long().to(device),
                past_key_values=past,
                use_cache=True,
                logits_to_keep=1,
            ).past_key_values
        logits = model(input_ids=mark, past_key_values=past, use_cache=True).logits[:, -1]
        right += int((logits.argmax(-1).cpu() == answer).sum())
    return right / questions


def _write(config: RecallConfig, rows: Sequence[Remembered]) -> None:
    about = (
        f"Share of {config.questions} questions answered right, by the tokens between a word "
        f"(one of {config.words}) and the question; {config.n_steps(0)} steps of {config.batch} x "
        f"{config.length} tokens, seed {config.seed}."
    )
    write_results(
        config.output,
        config,
        rows,
        markdown(about, table(config, rows)),
        {"": [Line(row.model, list(row.accuracy.items())) for row in rows]},
        name="recall",
        title="One word remembered over a filler",
        sizes="tokens in between",
        guessing=1 / config.words,
        trained=config.length,
    )


def table(config: RecallConfig, rows: Sequence[Remembered]) -> Table:
    """Share of right answers of each model, by the tokens in between."""
    columns = ["model", "parameters", *(f"{distance:,}" for distance in config.distances)]
    return Table(
        "",
        columns,
        [
            [
                row.model,
                f"{row.parameters:,}",
                *(f"{100 * share:.0f} %" for share in row.accuracy.values()),
            ]
            for row in rows
        ],
    )
