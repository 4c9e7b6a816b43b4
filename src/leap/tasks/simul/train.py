"""Training: from a prepared corpus to a run folder with a model that reads and writes in turn."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from leap.errors import ConfigError, refuse_given
from leap.reports.files import read_json
from leap.reports.progress import Progress, silent
from leap.tasks.simul.audio.features import SPEC_AUGMENT
from leap.tasks.simul.data import Collate, Drawn, TokenBatches
from leap.tasks.simul.model import (
    ModelConfig,
    Translator,
    build_model,
    check_model,
    save_model,
    take_decoder,
    take_encoder,
)
from leap.tasks.simul.paths import Paths
from leap.tasks.simul.prepare import Prepared, load_prepared
from leap.training import Recipe, RunFolder, Work, train_run

DEFAULT_STEPS = 800
OF_SPEECH = ("subsampling", "ctc_weight", "augment")
"""Settings that a model of text has no use for."""
RESULTS = {"steps": int, "best_step": int, "best_loss": float, "averaged": bool, "parameters": int}
"""What is read of metrics.json."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Recipe, Paths, ModelConfig):
    """Train a translation model that can read and write in turn.

    A run that was stopped resumes, and a finished one is extended if it is to take more steps.
    """

    data: Path = Path("runs/simul-data")
    """Folder that leap simul prepare has written."""
    output: Path = Path("runs/simul")
    """Run folder: settings, checkpoints, model, results, learning curve."""
    target: Literal["translation", "transcript"] = "translation"
    """What to write: the translation; or, of speech, what is said, which is learnt sooner and makes
    an encoder to begin translation with."""
    encoder_from: Path | None = None
    """Run whose encoder to begin with, as one that was trained on the transcripts; its sizes must
    be the same. By default all weights are new."""
    decoder_from: Path | None = None
    """Run whose decoder to begin with, as one that was trained on more text; its sizes and subwords
    must be the same. By default all weights are new."""
    tokens: int | None = None
    """Subwords of the longer side in a batch, or frames of speech, padding counted; by default 1024
    and 16384."""
    augment: Literal["lb", "ld", "sm", "ss"] | None = "lb"
    """SpecAugment policy for speech; None for none."""

    steps: int | None = None
    """Optimiser steps; 800 unless epochs are given, which the numbers are learnt in."""
    batch: int = 1
    """Batches of that many tokens per step, over all processes and accumulated parts."""
    learning_rate: float = 3e-3
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW betas."""
    evaluate_every: int = 100
    """Steps between evaluations on held-out text, each with a checkpoint to resume from."""
    average: int = 5
    """Checkpoint averaging: how many of the last ones; their mean is taken if it does best."""

    def __post_init__(self) -> None:
        Recipe.__post_init__(self)
        Paths.__post_init__(self)
        if self.tokens is not None and self.tokens < 1:
            raise ConfigError(f"tokens={self.tokens} must be 1 or more")

    def n_steps(self, n_items: int) -> int:
        """Optimiser steps, where `n_items` batches make an epoch."""
        if self.steps is None and self.epochs is None:
            return DEFAULT_STEPS
        return super().n_steps(n_items)


def train(config: TrainConfig, progress: Progress = silent) -> dict[str, Any]:
    """Train as the config says, or go on with it, or, if that has been done, tell the results.

    Under `torchrun` every process calls this; the first one writes.

    Returns:
        The results, as metrics.json has them.
    """
    check_model(config, config.device)
    settings = asdict(config)
    for name in ("output", "device"):
        settings.pop(name)
    folder = RunFolder(config.output, settings, config.extends)
    finished = folder.metrics(RESULTS)
    if finished is not None:
        return finished
    return train_run(folder, RESULTS, config, lambda: _work(config), progress)


def _work(config: TrainConfig) -> Work:
    prepared = load_prepared(config.data)
    is_spoken = prepared.extractor is not None
    if not is_spoken:
        refuse_given(config, OF_SPEECH, f"of speech, and {config.data} holds text")
    tokens = config.tokens or (16384 if is_spoken else 1024)
    gaps = None if config.augment is None else SPEC_AUGMENT[config.augment]
    train = prepared.dataset("train", gaps, target=config.target)
    valid = prepared.dataset("valid", target=config.target)
    n_steps = config.n_steps(TokenBatches(train, tokens).per_pass)
    collate = Collate(
        config,
        is_speech=is_spoken,
        seed=config.seed,
        with_transcript=is_spoken and config.ctc_weight > 0,
    )
    return Work(
        name=config.attention,
        title=config.data.name,
        digests={"sentences": read_json(config.data / "data.json")["text"]},
        build=lambda: _build(config, prepared),
        train=Drawn(TokenBatches(train, tokens, n_steps * config.batch, config.seed)),
        held_out=Drawn(TokenBatches(valid, tokens, seed=None)),
        recipe=replace(config, steps=n_steps, epochs=None),
        results=lambda model, fitted: {
            **asdict(fitted),
            "parameters": model.num_parameters(),
            "sentences": prepared.facts["sentences"]["train"],
            "pieces": len(prepared.vocabulary),
        },
        save=lambda model, path: save_model(model, prepared.vocabulary, prepared.extractor, path),
        options={"collate": collate, "shuffle": False},
    )


def _build(config: TrainConfig, prepared: Prepared) -> Translator:
    extractor = prepared.extractor
    model = build_model(
        config, prepared.vocabulary, None if extractor is None else extractor.feature_size
    )
    model.config.source_language = prepared.facts["source"]
    if config.encoder_from is not None:
        take_encoder(model, prepared.vocabulary, config.encoder_from)
    if config.decoder_from is not None:
        take_decoder(model, prepared.vocabulary, config.decoder_from)
    return model
