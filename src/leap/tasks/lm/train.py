"""Training: from a text to a run folder with a model, its results and its learning curve."""

from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Subset
from transformers import PreTrainedModel

from leap.errors import ConfigError
from leap.layers.equalise import learned_parts
from leap.reports.progress import Progress, silent
from leap.tasks.lm.data import Blocks, Corpus, TextRead, read_corpus
from leap.tasks.lm.evaluate import equalise, score
from leap.tasks.lm.model import ModelConfig, build_model, check_attention, check_model
from leap.tasks.lm.tokenizer import TextTokenizer, load_tokenizer, make_tokenizer
from leap.training import (
    Fitted,
    Recipe,
    RunFolder,
    Work,
    processes,
    save_weights,
    train_run,
    whole_batches,
)

RESULTS = {
    "steps": int,
    "best_step": int,
    "best_loss": float,
    "seconds_per_step": float | None,
    "cpu_seconds_per_step": float | None,
    "parameters": int,
    "test": {"perplexity": float, "word_perplexity": float, "bits_per_byte": float},
    "history": [{"step": int}],
}
"""What is read of metrics.json."""


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """What to learn from."""

    data: str | None = None
    """Text file, folder of them, Hugging Face dataset (name, or folder it was saved to), or
    wikitext-2; by default the Python library of this machine."""
    tokenizer: str = "bytes"
    """bytes, or a SentencePiece (.model) or tokenizers (.json) file."""
    train_tokenizer: int | None = None
    """Train a tokenizer with this vocabulary size on the text; by default none is trained."""
    length: int = 512
    """Tokens in a sequence."""
    valid_tokens: int | None = 131072
    """Held-out tokens to evaluate on during training, in whole batches from their start; None for
    all."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Recipe, ModelConfig, TextConfig):
    """Train a language model, keeping the checkpoint that does best on held-out text.

    A run that was stopped resumes, and a finished one is extended if it is to take more steps.
    """

    output: Path = Path("runs/lm")
    """Run folder: settings, checkpoints, model, results, learning curve."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("length", "valid_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more")
        check_attention(self.attention)


@dataclass(frozen=True)
class Texts:
    """A corpus and its tokens."""

    corpus: Corpus
    tokenizer: TextTokenizer
    train: Tensor
    valid: Tensor


def train(
    config: TrainConfig, progress: Progress = silent, read: TextRead | None = None
) -> dict[str, Any]:
    """Train as the config says, or go on with it, or, if that has been done, tell the results.

    Under `torchrun` every process calls this; the first one writes, and is told the text.

    Returns:
        The results, as metrics.json has them.
    """
    check_model(config, config.length, config.device)
    folder = run_folder(config)

    def work() -> Work:
        texts = prepare(config, folder)
        if read is not None and processes(config.device).is_main_process:
            read(texts.corpus)
        return _work(config, texts)

    return train_run(folder, RESULTS, config, work, progress)


def _work(config: TrainConfig, texts: Texts) -> Work:
    def results(model: PreTrainedModel, fitted: Fitted) -> dict[str, Any]:
        documents = list(texts.corpus.test)
        test = score(model, texts.tokenizer, documents, length=config.length)
        without = {}
        for part in learned_parts(model):
            with equalise(model, texts.tokenizer, list(texts.corpus.valid), part):
                held = score(model, texts.tokenizer, documents, length=config.length)
            without[part] = held.perplexity
        return {
            **asdict(fitted),
            "parameters": model.num_parameters(),
            "train_tokens": len(texts.train),
            "tokens_seen": fitted.steps * config.batch * config.length,
            "test": test.to_json(),
            "equalised": without,  # Test perplexity with a learned part held at its mean.
        }

    def save(model: PreTrainedModel, path: Path) -> None:
        save_weights(model, path)
        texts.tokenizer.save(path)

    return Work(
        name=config.attention,
        title=texts.corpus.name,
        digests={"text": _digest(texts.train, texts.valid)},
        build=lambda: build_model(config, texts.tokenizer, config.length),
        train=Blocks(texts.train, config.length, f"the text of {texts.corpus.name}"),
        held_out=_held_out(texts.valid, config),
        recipe=config,
        results=results,
        save=save,
        folders={"tokenizer": texts.tokenizer.save},
    )


def run_folder(config: TrainConfig) -> RunFolder:
    """The folder of a run, by all its settings but where that is, and where it computes."""
    settings = asdict(config)
    for name in ("output", "device"):
        settings.pop(name)
    return RunFolder(config.output, settings, config.extends)


def prepare(config: TrainConfig, folder: RunFolder) -> Texts:
    """Read the text, and turn it into tokens by the run's tokenizer."""
    corpus = read_corpus(config.data)
    if (folder.path / "tokenizer").exists():
        tokenizer = load_tokenizer(folder.path / "tokenizer")
    else:
        tokenizer = make_tokenizer(config.tokenizer, config.train_tokenizer, corpus.train)
    tokens = [tokenizer.encode_documents(part) for part in (corpus.train, corpus.valid)]
    return Texts(corpus, tokenizer, *tokens)


def _held_out(tokens: Tensor, config: TrainConfig) -> Subset[dict[str, Tensor]]:
    tokens = tokens[: config.valid_tokens and config.valid_tokens + 1]
    # A short text has little to hold out: then all of it is one sequence.
    length = min(config.length, len(tokens) - 1)
    blocks = Blocks(tokens, length, "the held-out text")
    return whole_batches(blocks, config.batch)


def _digest(*tokens: Tensor) -> str:
    digest = sha256()
    for part in tokens:
        digest.update(part.numpy().tobytes())
    return digest.hexdigest()[:16]
