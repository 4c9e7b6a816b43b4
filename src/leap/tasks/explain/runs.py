"""A run of any task to look at: its model, how it reads a text, and texts to try it on."""

import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from leap.errors import ConfigError, FileError
from leap.models import LeapformerForSequenceClassification
from leap.reports.files import read_json
from leap.runtime.streaming.vocabulary import EOS
from leap.tasks.files import check_logits, check_one_run, check_weights, data_folder, reading_model
from leap.tasks.lm.data import read_corpus
from leap.tasks.lm.model import load_model
from leap.tasks.lm.tokenizer import TextTokenizer, load_tokenizer
from leap.tasks.lra.data import DATA, load_task
from leap.tasks.lra.listops import VOCABULARY
from leap.tasks.simul.model import load_run as load_translation
from leap.tasks.simul.vocabulary import Vocabulary
from leap.training import quiet

Kind = Literal["lm", "classifier", "translation"]
CLASSIFIER = "LeapformerForSequenceClassification"
TRANSLATION = "LeapformerForSeq2SeqLM"
SPEECH = "LeapformerForSpeechSeq2Seq"


@dataclass(frozen=True)
class Run:
    """A trained model, and what it reads."""

    path: Path
    kind: Kind
    model: PreTrainedModel
    tokenizer: TextTokenizer | Vocabulary | None
    """None for a classifier that reads bytes, or no text at all."""
    settings: dict[str, Any]
    """Of the run; empty for a folder with nothing but a model."""

    @property
    def name(self) -> str:
        """What to call it: of one seed among several, the folder around it too."""
        path = self.path.resolve()
        return f"{path.parent.name}/{path.name}" if path.name.startswith("seed-") else path.name

    @property
    def task(self) -> str:
        """What it was trained on, by the name that Long Range Arena has for it."""
        return str(self.settings.get("task", "text"))

    def encode(self, text: str) -> Tensor:
        """The tokens of a text `[1, t]`, as the model was trained to read it."""
        if self.kind == "lm":
            assert isinstance(self.tokenizer, TextTokenizer)
            # It begins after the end of another text.
            return torch.tensor([[self.tokenizer.eos_id, *self.tokenizer.encode(text).tolist()]])
        if self.kind == "translation":
            assert isinstance(self.tokenizer, Vocabulary)
            return torch.tensor([[*self.tokenizer.encode(text), EOS]])
        if isinstance(self.tokenizer, TextTokenizer):
            return self.tokenizer.encode(text).long()[None, : self.longest]
        if self.task != "text":
            raise ConfigError(f"run={self.path} is of {self.task}, and reads no text; give none")
        # Of Long Range Arena: bytes, after the pad.
        return torch.tensor([[1 + byte for byte in text.encode()[: self.longest]]])

    def left_out(self, text: str) -> int:
        """Tokens at the end of a text that a classifier does not read."""
        if self.kind != "classifier":
            return 0
        own = self.tokenizer if isinstance(self.tokenizer, TextTokenizer) else None
        return max(0, len(text.encode() if own is None else own.encode(text)) - self.longest)

    def spell(self, ids: Tensor) -> list[str]:
        """The text of each token."""
        tokens = ids[0].tolist()
        if isinstance(self.tokenizer, TextTokenizer):
            step = self.tokenizer.stream()
            first = [str(self.tokenizer.hugging_face.eos_token)] if self.kind == "lm" else []
            return first + [step(token) for token in tokens[len(first) :]]
        if isinstance(self.tokenizer, Vocabulary):
            return [self.tokenizer.pieces[token] for token in tokens]
        if self.task.startswith("listops"):
            return [VOCABULARY[token - 1] if token else "pad" for token in tokens]
        if self.task != "text":
            return [str(token) for token in tokens]
        return [bytes([token - 1]).decode("latin-1") for token in tokens]

    def spell_one(self, target: int) -> str:
        """What a target is called: a token's text, or a class."""
        if self.kind == "classifier":
            return f"class {target}"
        assert isinstance(self.tokenizer, TextTokenizer)
        return self.tokenizer.decode([target]) or str(self.tokenizer.hugging_face.eos_token)

    @property
    def longest(self) -> int:
        """Tokens that a classifier reads of a text."""
        config: Any = self.model.config
        return int(self.settings.get("max_length", config.n_positions))

    def texts(self, data: str | None, length: int, limit: int) -> Iterator[Tensor]:
        """Texts to try the model on `[1, t]`: of the test part, none of which it has learned from.

        Args:
            data: where from; None for what the run was trained on, or IMDb.
            length: tokens of each.
            limit: how many to give at most.
        """
        if self.kind == "lm":
            corpus = read_corpus(self.settings.get("data") if data is None else data)
            assert isinstance(self.tokenizer, TextTokenizer)
            tokens = self.tokenizer.encode_documents(corpus.test).long()
            # Spread over the text, with the token that comes after each.
            starts = torch.linspace(0, max(len(tokens) - length - 1, 0), limit).long().unique()
            yield from (tokens[None, i : i + length + 1] for i in starts.tolist())
            return
        for text in _reviews(data, limit):
            ids = self.encode(text)[:, :length]
            if ids.shape[1] > 1:
                yield ids


def open_run(path: Path) -> Run:
    """The run in a folder: a language model, a classifier or a translation model."""
    if not path.is_dir():
        raise FileError(f"no run folder at {path}; train a model with leap lm train")
    check_one_run(path)
    folder = path / "model" if (path / "model" / "config.json").exists() else path
    settings = read_json(path / "config.json") if folder != path else {}
    names = _architectures(folder)
    if SPEECH in names:
        raise FileError(f"{path} reads speech, whose frames have no text; give a run of text")
    if TRANSLATION in names:
        translator, vocabulary = load_translation(path)
        return Run(path, "translation", translator, vocabulary, settings)
    if CLASSIFIER in names:
        model = _load_classifier(folder)
        has_own = (folder / "tokenizer_config.json").exists()
        return Run(path, "classifier", model, load_tokenizer(folder) if has_own else None, settings)
    lm, tokenizer = load_model(path)
    return Run(path, "lm", lm, tokenizer, settings)


def first_example(run: Run, data: Path | None) -> Tensor:
    """Tokens of a test example of the task that a classifier was trained on, `[1, t]`."""
    return load_task(run.task, DATA if data is None else data, "test")[0]["input_ids"][None]


def _architectures(folder: Path) -> list[str]:
    if not (folder / "config.json").exists():
        return []  # Of a run that is not finished, for those to tell who load it.
    return list(read_json(folder / "config.json").get("architectures") or ())


def _load_classifier(folder: Path) -> PreTrainedModel:
    options: dict[str, Any] = {"local_files_only": True}
    with reading_model(folder), quiet():
        config: Any = AutoConfig.from_pretrained(str(folder), **options)
        if config.two_inputs:
            raise FileError(f"{folder} classifies pairs of texts, which cannot be explained yet")
        found: Any = LeapformerForSequenceClassification.from_pretrained(
            str(folder), config=config, use_safetensors=True, output_loading_info=True, **options
        )
        model, loaded = found
        check_weights(model, loaded, folder)
        with torch.no_grad():
            check_logits(model.eval()(input_ids=torch.ones(1, 1, dtype=torch.long)).logits)
    return model


def _reviews(data: str | None, limit: int) -> Iterator[str]:
    """The texts of a JSON Lines file, spread over it; by default IMDb's tests."""
    path = data_folder() / "imdb" / "test.jsonl.xz" if data is None else Path(data)
    try:
        opened = lzma.open if path.suffix == ".xz" else open
        with opened(path, "rt", encoding="utf-8") as file:
            lines = file.readlines()
        for i in torch.linspace(0, len(lines) - 1, min(limit, len(lines))).long().tolist():
            yield str(json.loads(lines[i])["text"])
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise FileError(
            f"cannot read texts from {path} ({error}); give a file with a JSON object per line"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise FileError(f"{path} has a line without a JSON object with a text") from error
