"""Several models in equal budget: the same text, tokens, order, seed and schedule for each.

    results.json, results.md   what came out, one row per model; after each model, of those so far
    curves.png                 held-out loss by step and by CPU time, means over seeds
    tokenizer.json             trained once, for all
    <model>/                   the run folder of each

A model that is done is not trained again, so others can be added later, also on another machine
by its results.json.
"""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import sha256
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, cast, get_args

import torch

from leap.errors import ConfigError, FileError, refuse_given
from leap.layers import FORMULATIONS
from leap.models.config import PositionEmbedding
from leap.reports.files import DPI, read_json, write_json, write_report, write_whole
from leap.reports.plots import Line, Panel, plot
from leap.reports.progress import Progress, named, silent
from leap.reports.table import MIB, Table, markdown, optional, perplexity
from leap.tasks.lm.data import Blocks, TextRead, read_corpus
from leap.tasks.lm.evaluate import perplexity_of
from leap.tasks.lm.model import (
    MechanismConfig,
    ModelConfig,
    SizeConfig,
    build_model,
    check_attention,
    check_model,
)
from leap.tasks.lm.tokenizer import make_tokenizer
from leap.tasks.lm.train import TextConfig, TrainConfig, prepare, run_folder, train
from leap.tasks.mechanism import OPTIONS, parse_option
from leap.training import PeakBytes, Recipe, RunFolder, processes

POSITIONS: tuple[str, ...] = get_args(PositionEmbedding)


@dataclass(frozen=True, kw_only=True)
class CompareConfig(Recipe, SizeConfig, TextConfig):
    """Train several language models in equal budget, and write a table of what came out.

    Models that are done are kept, and one that was stopped goes on: run the same command again. By
    default this is LEAP's own experiment, with a smaller vocabulary, fewer epochs and a larger
    learning rate.
    """

    models: tuple[str, ...] = (
        "leapformer",
        "softmax:rotary:gate:conv4:output-gate",
        "linear:none:gate:conv4:output-gate",
        "gated-delta:conv4",
        "leapformer:paper:alibi",
        "softmax:rotary",
        "leap:windowed",
        "cosformer:alibi",
        "gpt2",
    )
    """Models: gpt2, or an attention with options after colons: for leap global or windowed, and a
    formulation (leap:windowed:leap-1.0); for any a kind of position (leapformer:rotary), a
    convolution of some taps (softmax:rotary:conv4), gate, gate-channel or output-gate; for
    leapformer paper, travelled or constant (steps), with which it has no more than is named, and
    clocks2. Several attentions with commas
    take turns; hybrid is leap,leapformer."""
    data: str | None = "wikitext-2"
    """Text, as for leap lm train."""
    train_tokenizer: int | None = 8192
    """Train a tokenizer with this vocabulary size on the text; None to take the one given."""
    length: int = 1024
    """Tokens in a sequence."""
    steps: int | None = None
    """Optimiser steps, in place of epochs; by default epochs count."""
    epochs: float | None = None
    """Epochs over the training text; 3 unless steps are given."""
    batch: int = 4
    """Sequences in each step, over all processes and accumulated parts together."""
    learning_rate: float = 2e-3
    """Peak learning rate of AdamW."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """Learning-rate schedule after the warm-up."""
    warmup: float = 0.02
    """Share of the steps in which the learning rate rises to its peak."""
    seeds: tuple[int, ...] = ()
    """Random seeds, a run of each model for each, in place of one seed; the table then has means
    and, behind ±, standard deviations."""
    recorded: Path | None = None
    """results.json of the same comparison, made elsewhere: its runs are taken as they are, and not
    trained again. By default all are trained."""
    output: Path = Path("runs/compare")
    """Folder for the table, the curves and a run folder for each model and seed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.models:
            raise ConfigError("models is empty; name at least one")
        if len(set(self.models)) < len(self.models):
            raise ConfigError(f"models={' '.join(self.models)}: one of them is named twice")
        if len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds={' '.join(map(str, self.seeds))}: one is named twice")
        if self.seeds:
            refuse_given(self, ("seed",), f"in place of seeds={' '.join(map(str, self.seeds))}")
        for model in self.models:
            parse_model(model)


@dataclass(frozen=True)
class Outcome:
    """What came out of one run."""

    seed: int
    perplexity: float
    word_perplexity: float
    bits_per_byte: float
    valid_perplexity: float
    seconds_per_step: float | None
    cpu_seconds_per_step: float | None
    best_step: int
    equalised: dict[str, float] = field(default_factory=dict)
    """Test perplexity with a learned part held at its mean, by the part."""


@dataclass(frozen=True)
class Row:
    """What came out for one model, with each seed."""

    model: str
    parameters: int
    peak_bytes: int | None
    outcomes: tuple[Outcome, ...]

    def values(self, name: str) -> list[float]:
        """One of the figures of every run that has it."""
        found = [getattr(outcome, name) for outcome in self.outcomes]
        return [value for value in found if value is not None]

    def cost_of_equal(self, part: str) -> list[float]:
        """By how much each run's perplexity rises with a learned part held at its mean."""
        return [o.equalised[part] - o.perplexity for o in self.outcomes if part in o.equalised]


def parse_model(text: str) -> ModelConfig:
    """A model from its short form, as `CompareConfig.models` has it."""
    names, *options = text.split(":")
    names = {"hybrid": "leap,leapformer"}.get(names, names)
    try:
        check_attention(names)
    except ConfigError as error:
        raise ConfigError(f"models: {text!r}: {error}, and hybrid") from error
    config = ModelConfig(attention=names)
    for option in options:
        if option in FORMULATIONS:
            config = replace(config, formulation=option)
        elif option in ("global", "windowed"):
            config = replace(config, windows="global" if option == "global" else "doubling")
        elif option in POSITIONS:
            config = replace(config, position_embedding=cast(PositionEmbedding, option))
        elif (found := parse_option(option)) is not None:
            config = replace(config, **found)
        else:
            raise ConfigError(
                f"models: option {option!r} in {text!r} is not known; there are global, windowed, "
                f"{', '.join([*FORMULATIONS, *POSITIONS, *OPTIONS])}, conv4, clocks2, hidden8"
            )
    return config


def folder_name(text: str) -> str:
    """The name of a model's folder, from its short form."""
    return text.replace(":", "-").replace(",", "+")


def compare(
    config: CompareConfig,
    progress: Progress = silent,
    peak_bytes: PeakBytes | None = None,
    read: TextRead | None = None,
) -> list[Row]:
    """Train each model, or take up where that was stopped, and write the table after each.

    Args:
        config: what to compare.
        progress: told how far the work is.
        peak_bytes: how to measure memory, as `leap.bench.measure.peak_bytes` does; None leaves
            it out.
        read: told the text.
    """
    if processes(config.device).num_processes > 1:
        raise ConfigError("models are compared in one process; run it without torchrun")
    runs = run_configs(config)
    text = _prepare(config, runs, read)
    known = Recorded() if config.recorded is None else read_recorded(config, text)
    rows: dict[str, Row] = {}
    histories: dict[str, Any] = {}
    for seed in _seeds(config):
        for name in config.models:
            run = runs[name, seed]
            label = f"{name}, seed {seed}"
            if label in known.rows:
                row, histories[label] = known.rows[label], known.histories[label]
                steps = known.steps
            else:
                memory = _memory(name, runs[name, _seeds(config)[0]], peak_bytes)
                named_by = name if len(_seeds(config)) == 1 else label
                metrics = train(run, named(progress, named_by))
                row = Row(name, metrics["parameters"], memory, (_outcome(seed, metrics),))
                histories[label], steps = metrics["history"], metrics["steps"]
            if name in rows:
                row = replace(rows[name], outcomes=(*rows[name].outcomes, *row.outcomes))
            rows[name] = row
            _write(config, text, steps, list(rows.values()), histories)
    return list(rows.values())


@dataclass(frozen=True)
class Recorded:
    """Runs that an earlier comparison has made: a row of one outcome each, by model and seed."""

    rows: dict[str, Row] = field(default_factory=dict)
    histories: dict[str, Any] = field(default_factory=dict)
    steps: int = 0


def read_recorded(config: CompareConfig, text: str) -> Recorded:
    """The runs of `config.recorded`.

    Args:
        config: what is compared.
        text: hash of the text that is learned from.

    Raises:
        FileError: if the file is no such record, or one of runs with other settings.
    """
    path = config.recorded
    assert path is not None
    found = read_json(path)
    try:
        recorded, its_text, steps = found["config"], found["text"], found["steps"]
        histories = dict(found["histories"])
        rows = {
            f"{row['model']}, seed {one['seed']}": Row(**row | {"outcomes": (Outcome(**one),)})
            for row in found["rows"]
            for one in row["outcomes"]
        }
        others = {name: recorded[name] for name in settings_in_common(config)}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileError(f"{path} is no results.json of leap lm compare ({error!r})") from error
    wanted = json.loads(json.dumps(settings_in_common(config), default=str))
    for name, value in wanted.items():
        if others[name] != value:
            raise FileError(f"{path} has runs with {name}={others[name]}, not {value}")
    if its_text != text:
        raise FileError(f"{path} has runs that learned from another text")
    if not histories.keys() >= rows.keys():
        raise FileError(f"{path} lacks the learning curves of some of its runs")
    return Recorded(rows, histories, steps)


def settings_in_common(config: CompareConfig) -> dict[str, Any]:
    """What all runs have in common: more models and seeds may come later."""
    settings = asdict(config)
    for name in ("models", "seeds", "seed", "output", "device", "recorded"):
        settings.pop(name)
    return settings


def _outcome(seed: int, metrics: dict[str, Any]) -> Outcome:
    return Outcome(
        seed=seed,
        perplexity=metrics["test"]["perplexity"],
        word_perplexity=metrics["test"]["word_perplexity"],
        bits_per_byte=metrics["test"]["bits_per_byte"],
        valid_perplexity=perplexity_of(metrics["best_loss"]),
        seconds_per_step=metrics["seconds_per_step"],
        cpu_seconds_per_step=metrics["cpu_seconds_per_step"],
        best_step=metrics["best_step"],
        equalised=metrics.get("equalised", {}),
    )


def _seeds(config: CompareConfig) -> tuple[int, ...]:
    return config.seeds or (config.seed,)


def run_configs(config: CompareConfig) -> dict[tuple[str, int], TrainConfig]:
    """The runs by model and seed: alike but for these."""
    common = {f.name: getattr(config, f.name) for f in fields(config)}
    for name in ("models", "seeds", "output", "recorded"):
        common.pop(name)
    if common["steps"] is None and common["epochs"] is None:
        common["epochs"] = 3.0
    if common["train_tokenizer"] is not None:
        common |= {"tokenizer": str(config.output / "tokenizer.json"), "train_tokenizer": None}
    runs = {}
    for text in config.models:
        model = parse_model(text)
        own = {f.name: getattr(model, f.name) for f in fields(MechanismConfig)}
        if model.position_embedding is not None:
            own["position_embedding"] = model.position_embedding
        for seed in _seeds(config):
            folder = folder_name(text) + ("" if seed == config.seed else f"-seed-{seed}")
            own |= {"seed": seed, "output": config.output / folder}
            runs[text, seed] = TrainConfig(**common | own)
    return runs


def _prepare(
    config: CompareConfig, runs: dict[tuple[str, int], TrainConfig], read: TextRead | None
) -> str:
    """Make the folder, whose models must have all but themselves in common, and the tokenizer.

    Returns:
        A hash of the text that is learned from.

    Raises:
        ConfigError: if one of the models cannot be made, and before anything is written.
    """
    for (name, _), run in runs.items():
        try:
            check_model(run, run.length, run.device)
        except ConfigError as error:
            raise ConfigError(f"models: {name!r}: {error}") from error
    folder = RunFolder(config.output, settings_in_common(config) | {"seed": config.seed})
    corpus = read_corpus(config.data)
    if read is not None:
        read(corpus)
    path = config.output / "tokenizer.json"
    is_new = config.train_tokenizer is not None and not path.exists()
    if config.train_tokenizer is None or is_new:
        tokenizer = make_tokenizer(config.tokenizer, config.train_tokenizer, corpus.train)
    else:
        tokenizer = make_tokenizer(str(path))
    text = sha256("".join(corpus.train).encode()).hexdigest()[:16]
    folder.create({"text": text})
    if is_new:
        write_whole(path, tokenizer.hugging_face.backend_tokenizer.to_str())
    return text


def _memory(name: str, run: TrainConfig, peak_bytes: PeakBytes | None) -> int | None:
    """Memory of one step forward and backward, on top of the model; measured once a folder."""
    if peak_bytes is None:
        return None
    path = run.output.with_name(f"{run.output.name}.memory.json")
    if path.exists():
        return read_json(path)["peak_bytes"]
    texts = prepare(run, run_folder(run))
    model = build_model(run, texts.tokenizer, run.length).train()
    blocks = Blocks(texts.train, run.length, texts.corpus.name)
    examples = [blocks[i % len(blocks)] for i in range(run.batch // run.accumulate)]
    batch = {key: torch.stack([example[key] for example in examples]) for key in examples[0]}
    model(**batch).loss.backward()  # The gradients, which stay, are not what is measured.
    found = peak_bytes(lambda: model(**batch).loss.backward(), torch.device("cpu"))
    write_json(path, {"model": name, "peak_bytes": found})
    return found


def _write(
    config: CompareConfig,
    text: str,
    steps: int,
    rows: Sequence[Row],
    histories: dict[str, Any],
) -> None:
    about = {"torch": torch.__version__, "processor": platform.processor() or platform.machine()}
    results = {
        "config": asdict(config),
        "machine": about,
        "text": text,
        "steps": steps,
        "rows": [asdict(row) for row in rows],
        "histories": histories,
    }
    page = markdown(describe(config, steps), table(rows))
    write_report(config.output, {"results.json": results, "results.md": page})
    figure = plot(learning_curves(rows, histories), describe(config, steps))
    figure.savefig(config.output / "curves.png", dpi=DPI)


def learning_curves(rows: Sequence[Row], histories: dict[str, Any]) -> list[Panel]:
    """Held-out loss of each model against steps and, where it was taken, against CPU time.

    Of several seeds the mean is drawn, with a bar of one standard deviation to either side.
    """
    by_step, by_time = [], []
    for row in rows:
        runs = [histories[f"{row.model}, seed {outcome.seed}"] for outcome in row.outcomes]
        losses: dict[int, list[float]] = {}
        for point in (point for run in runs for point in run if "eval_loss" in point):
            losses.setdefault(point["step"], []).append(point["eval_loss"])
        of_all = {step: each for step, each in losses.items() if len(each) == len(runs)}
        spread = [stdev(each) for each in of_all.values()] if len(runs) > 1 else None
        points = [(step, fmean(each)) for step, each in of_all.items()]
        by_step.append(Line(row.model, points, spread))
        if seconds := row.values("cpu_seconds_per_step"):
            per_step = fmean(seconds) / 60
            timed = [(step * per_step, loss) for step, loss in points]
            by_time.append(Line(row.model, timed, spread))
    loss = "held-out loss (nats per token)"
    panels = [Panel(x="step", y=loss, lines=by_step)]
    if by_time:
        panels.append(Panel(x="CPU minutes of training", y=loss, lines=by_time))
    return panels


def describe(config: CompareConfig, steps: int) -> str:
    """One line on what was done."""
    return (
        f"{config.data or 'the Python library'}: {steps} steps of {config.batch} x "
        f"{config.length} tokens, AdamW {config.learning_rate:g} {config.schedule}, "
        f"{'seed' if len(_seeds(config)) == 1 else 'seeds'} {', '.join(map(str, _seeds(config)))}"
    )


COLUMNS = (
    "model",
    "parameters",
    "perplexity",
    "per word",
    "bits per byte",
    "proportions equal",
    "gates equal",
    "s per step",
    "CPU s per step",
    "peak MiB",
)


SMALL_PERPLEXITY = 20.0


def table(rows: Sequence[Row]) -> Table:
    """What came out.

    Perplexities are of the test text; "equal" is what they rise by with a learned part held at its
    mean. Of several seeds means are given, and standard deviations where a difference may be read
    off. Small perplexities, as those of bytes, have a digit more.
    """
    return Table("", COLUMNS, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    n_digits = 2 if fmean(row.values("perplexity")) >= SMALL_PERPLEXITY else 3
    return [
        row.model,
        f"{row.parameters:,}",
        _mean(row.values("perplexity"), n_digits, spread=True),
        perplexity(fmean(row.values("word_perplexity")), 1),
        _mean(row.values("bits_per_byte"), 4, spread=True),
        _mean(row.cost_of_equal("proportions"), n_digits, spread=True, sign="+"),
        _mean(row.cost_of_equal("gates"), n_digits, spread=True, sign="+"),
        _mean(row.values("seconds_per_step"), 2),
        _mean(row.values("cpu_seconds_per_step"), 2),
        optional(None if row.peak_bytes is None else row.peak_bytes / MIB, 0),
    ]


def _mean(values: Sequence[float], digits: int, *, spread: bool = False, sign: str = "") -> str:
    """The mean of several runs, and how far they lie apart; empty where there is none."""
    if not values:
        return ""
    mean = f"{fmean(values):{sign},.{digits}f}"
    if not spread or len(values) == 1:
        return mean
    return f"{mean} ± {stdev(values):.{digits}f}"
