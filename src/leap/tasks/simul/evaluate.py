"""Quality against latency: a test translated under several policies, and scored.

Sentences are translated many at a time (`StreamPool`), or by SimulEval with our agent, which gives
the same words with the same delays; where sound must be resampled as it comes, they are a segment
later. The scores are ours, of the log of either.

    results.json, results.md    the scores
    curve.png                   quality against latency
    <policy>/instances.log      each sentence as SimulEval logs it, for other tools

In long form the sentences are joined into streams (`leap.tasks.simul.scoring.longform`), and there
are

    cost.png                    time of a step and size of what is kept, along the streams
    <policy>/steps.csv          the same of each step
    <policy>/instances.log      each stream
    <policy>/sentences.log      the sentences that they were cut into
"""

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure

from leap.errors import ConfigError, LeapError, refuse_given
from leap.reports.files import write_json, write_report, write_whole
from leap.reports.progress import Progress, Status, silent
from leap.reports.table import Table, csv_table, markdown
from leap.runtime.streaming.pauses import Pauses
from leap.runtime.streaming.policies import Offline, Wait, read_policy, waiting
from leap.runtime.streaming.stream import Interpreter as AnyInterpreter
from leap.tasks.simul.corpora.corpus import Sentence
from leap.tasks.simul.prepare import load_prepared
from leap.tasks.simul.scoring import omnisteval
from leap.tasks.simul.scoring.curves import families, plot_quality
from leap.tasks.simul.scoring.longform import (
    Step,
    Translated,
    cost_curve,
    join,
    plot_cost,
    sound_of,
    translate_long,
)
from leap.tasks.simul.scoring.metrics import (
    LATENCIES,
    METRICS,
    Instance,
    Scores,
    read_instances,
    score,
    without_nan,
)
from leap.tasks.simul.scoring.resegment import check_size
from leap.tasks.simul.scoring.simuleval import write_simuleval
from leap.tasks.simul.streaming.stream import Interpreter, load_trained


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Translate a test under several waits, and measure quality and latency.

    Latency is in words of the source, or in milliseconds of speech. Prints a table; writes
    results.json, results.md, curve.png and SimulEval's logs.
    """

    run: Path = Path("runs/simul")
    """Run folder of leap simul train."""
    data: Path = Path("runs/simul-data")
    """Folder that leap simul prepare has written."""
    part: str | None = None
    """Which of its parts to translate; by default the first test."""
    waits: tuple[Wait, ...] = (1, 3, 5, 7, 9, "offline")
    """Waits of wait-k, in subwords of text, or in steps of the ratio of speech; or offline."""
    policies: tuple[str, ...] = ()
    """Further policies: agree-2, align-2, tail-0.3, ..."""
    ratio: int | None = None
    """Pre-decision ratio of wait-k: source states per step; by default as the run was trained."""
    chunk_size: int | None = None
    """States read at once, 0 for all; by default the fewest of the training, offline the most."""
    beam: int = 1
    """Hypotheses to search for the end of a translation with, once the source has ended; offline
    that is all of it. 1 is greedy decoding."""
    segment: int = 320
    """Of speech: milliseconds that come at once."""
    limit: int | None = None
    """Sentences to translate, the first ones; by default all."""
    engine: Literal["pool", "simuleval"] = "pool"
    """What runs the streams: ours, many at a time, or SimulEval, one after another."""
    batch: int = 64
    """Streams in a pool. With 1, computing is timed, for computation-aware latency."""
    long_form: float | Literal["all"] | None = None
    """Join sentences into streams of this many words of text, or minutes of speech, or into one of
    all, and cut what comes out into sentences again by the references. By default each sentence
    is translated by itself."""
    reset: int | None = None
    """In long form: evaluate also with beginning anew at the end of a sentence or in a pause, and
    at the latest after this many states. Sound that is read as a whole, offline, has no resets.
    By default there are none."""
    pauses: Pauses = "loudness"
    """With reset: how pauses of speech are detected: loudness, or silero (silero-vad)."""
    pause: int = 500
    """In long form, of speech: milliseconds of silence between two sentences."""
    omnisteval: bool = False
    """Have OmniSTEval score what was logged, too."""
    tokenize: str = "13a"
    """sacrebleu's way to cut words for BLEU."""
    output: Path = Path("runs/simul-eval")
    """Folder to write."""

    def __post_init__(self) -> None:
        for name in ("beam", "segment", "batch", "limit", "ratio", "reset"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more")
        if self.pause < 0:
            raise ConfigError(f"pause={self.pause} must be 0 or more")
        if isinstance(self.long_form, int | float) and not self.long_form > 0:
            raise ConfigError(f"long_form={self.long_form:g} must be above 0, or all")
        if self.reset is not None and self.long_form is None:
            raise ConfigError("reset is for long form: give --long-form as well")
        if self.long_form is not None and self.engine == "simuleval":
            raise ConfigError("long form is run by us alone: leave --engine away")
        if self.reset is None:
            refuse_given(self, ("pauses",), "of resets, and reset is not given")
        if self.long_form is None:
            refuse_given(self, ("pause",), "of long form, and long_form is not given")
        if self.long_form is not None or self.engine == "simuleval":
            refuse_given(self, ("batch",), "of a pool, and here streams come one after another")
        if self.omnisteval:
            omnisteval.check_installed()
        if not self.waits and not self.policies:
            raise ConfigError("nothing to evaluate: give one or more waits or policies")


@dataclass(frozen=True)
class Evaluated:
    """What came out under one policy."""

    name: str
    """The policy's, and whether there were resets."""
    scores: Scores
    seconds: float | None
    """Computing of all sentences; by SimulEval, which times speech, up to the last word of each."""
    real_time_factor: float | None
    """Of speech: computing over sound; with a pool, over the sound of all its streams."""
    omnisteval: dict[str, float] | None = None
    """OmniSTEval's scores, if it was asked."""
    steps: Sequence[Step] = ()
    """In long form: what each step cost."""
    note: str = ""
    """What was asked for and not tried, and why."""


@dataclass(frozen=True)
class Task:
    """What all policies are tried on."""

    config: EvalConfig
    part: str
    sentences: Sequence[Sentence]
    is_speech: bool

    @property
    def unit(self) -> str:
        """Of latency."""
        return "ms" if self.is_speech else "words"

    @property
    def streams(self) -> Sequence[Sequence[Sentence]]:
        """In long form."""
        size = self.config.long_form
        return join(self.sentences, None if size == "all" else size)


@dataclass(frozen=True)
class Trial:
    """A policy that is tried."""

    name: str
    interpreter: Interpreter
    note: str = ""


def evaluate(config: EvalConfig, progress: Progress = silent) -> list[Evaluated]:
    """Translate and score under every policy, and write the results."""
    prepared = load_prepared(config.data)
    tests = [part for part in prepared.parts if part not in ("train", "valid")]
    part = config.part or (tests[0] if tests else "valid")
    sentences = prepared.sentences(part)[: config.limit]
    task = Task(config, part, sentences, is_speech=prepared.extractor is not None)
    trials = _trials(task)
    found = []
    for trial in trials:
        name = trial.name
        folder = config.output / name.replace("/", "-").replace(" ", "-")
        write_report(folder, {})

        def tell(done: int, name: str = name) -> None:
            progress(Status(done, len(sentences), name))

        run = _short if config.long_form is None else _long
        found.append(run(task, trial, folder, tell))
        _write(task, found)
    return found


def _trials(task: Task) -> list[Trial]:
    """All that is to be tried, so that what cannot be is refused before anything is."""
    config = task.config
    trained = load_trained(config.run)
    if (trained.extractor is not None) != task.is_speech:
        raise ConfigError(f"{config.run} and {config.data} are not of one kind of source")
    if not task.is_speech:
        of_speech = f"of speech, and {config.data} holds text"
        refuse_given(config, ("segment", "pause", "pauses"), of_speech)
    if config.long_form is not None:
        for stream in task.streams:
            n_words = sum(len(sentence.target.split()) for sentence in stream)
            check_size(n_words, n_words)  # A translation is about as long.
    ratio = config.ratio or trained.paths.ratio
    policies = [waiting(wait, ratio) for wait in config.waits]
    policies += [read_policy(name, ratio) for name in config.policies]
    trials = []
    for policy in policies:
        # A ratio of 1 goes without saying, unless this run's is another.
        name = policy.name.removesuffix("/1") if trained.paths.ratio == 1 else policy.name
        plain = trained.interpreter(policy, chunk_size=config.chunk_size, beam=config.beam)
        if config.reset is None:
            trials.append(Trial(name, plain))
        elif task.is_speech and isinstance(policy, Offline) and not plain.chunk_size:
            trials.append(Trial(name, plain, "not tried with resets, as it waits for the end"))
        else:
            resetting = trained.interpreter(
                policy,
                chunk_size=config.chunk_size,
                reset=config.reset,
                beam=config.beam,
                pauses=config.pauses,
            )
            resetting.row()  # Which a source that cannot be reset refuses.
            trials += [Trial(name, plain), Trial(f"{name} reset {config.reset}", resetting)]
    return trials


def _short(task: Task, trial: Trial, folder: Path, tell: Callable[[int], None]) -> Evaluated:
    config, log = task.config, folder / "instances.log"
    seconds: float | None
    if config.engine == "simuleval":
        policy = trial.interpreter.policy.name
        instances = run_simuleval(config, task.sentences, policy, folder)
        timed = [each for each in instances if each.is_timed]
        seconds = sum(each.computing for each in timed) / 1000 if timed else None
    else:
        started = time.perf_counter()
        timed = instances = translate(
            trial.interpreter, task.sentences, batch=config.batch, segment=config.segment, tell=tell
        )
        seconds = time.perf_counter() - started
        _write_log(log, instances)
    heard = sum(each.source_length for each in timed) / 1000
    return Evaluated(
        trial.name,
        score(instances, config.tokenize),
        seconds,
        seconds / heard if task.is_speech and seconds is not None else None,
        omnisteval.score_sentences(log, config.tokenize) if config.omnisteval else None,
        note=trial.note,
    )


def _long(task: Task, trial: Trial, folder: Path, tell: Callable[[int], None]) -> Evaluated:
    config, log = task.config, folder / "instances.log"
    streams: list[Translated] = []
    before = 0
    for index, joined in enumerate(task.streams):
        stream = translate_long(
            trial.interpreter,
            joined,
            index=index,
            segment=config.segment,
            pause=config.pause,
            tell=lambda done, before=before: tell(before + done),  # type: ignore[misc]
        )
        streams.append(stream)
        before += len(joined)
    steps = [step for stream in streams for step in stream.steps]
    seconds = sum(step.seconds for step in steps)
    heard = sum(stream.length for stream in streams) / 1000
    _write_log(log, [stream.whole(i) for i, stream in enumerate(streams)])
    write_whole(folder / "steps.csv", csv_table([asdict(step) for step in steps]))
    sentences: list[Instance] = []
    for stream in streams:
        sentences += stream.cut(len(sentences))
    _write_log(folder / "sentences.log", sentences)
    return Evaluated(
        trial.name,
        score(sentences, config.tokenize),
        seconds,
        seconds / heard if task.is_speech else None,
        omnisteval.score_streams(log, streams, config.tokenize) if config.omnisteval else None,
        steps,
        trial.note,
    )


def translate(
    interpreter: AnyInterpreter,
    sentences: Sequence[Sentence],
    *,
    batch: int = 64,
    segment: int = 320,
    tell: Callable[[int], None] = lambda done: None,
) -> list[Instance]:
    """Stream sentences, many at a time: what SimulEval would log of each.

    Args:
        interpreter: the model with its policy.
        sentences: text goes in word by word; of speech, a number of milliseconds at a time.
        batch: how many streams to step at once; computing is timed if it is 1.
        segment: milliseconds.
        tell: is told how many are done.
    """
    # Those of like length together, so that few streams wait for others.
    order = sorted(range(len(sentences)), key=lambda i: _size(sentences[i]))
    instances: dict[int, Instance] = {}
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        for i, instance in zip(
            chosen,
            _together(interpreter, [sentences[i] for i in chosen], segment, is_timed=batch == 1),
            strict=True,
        ):
            instances[i] = replace(instance, index=i)
        tell(len(instances))
    return [instances[i] for i in range(len(sentences))]


def _together(
    interpreter: AnyInterpreter, sentences: Sequence[Sentence], segment: int, *, is_timed: bool
) -> list[Instance]:
    parts: list[list[Any]] = []
    delays_of: list[list[float]] = []
    for sentence in sentences:
        if interpreter.extractor is None:
            words = sentence.source.split()
            parts.append([[word] for word in words])
            delays_of.append(list(range(1, len(words) + 1)))
        else:
            rate = interpreter.extractor.sampling_rate
            sound = sound_of(sentence, rate)
            size = -(-segment * rate // 1000)
            ends = [min(end, len(sound)) for end in range(size, len(sound) + size, size)]
            parts.append([sound[end - 1 - (end - 1) % size : end] for end in ends])
            delays_of.append([end * 1000 / rate for end in ends])
    pool = interpreter.pool(len(sentences))
    words_of: list[list[str]] = [[] for _ in sentences]
    delays: list[list[float]] = [[] for _ in sentences]
    elapsed: list[list[float]] = [[] for _ in sentences]
    is_timed = is_timed and interpreter.extractor is not None
    started = time.perf_counter()
    for step in range(max(map(len, parts))):
        new = pool.push([part[step] if step < len(part) else None for part in parts])
        ended = [i for i, part in enumerate(parts) if step == len(part) - 1]
        if ended:
            new = [said + more for said, more in zip(new, pool.finish(ended), strict=True)]
        spent = 1000 * (time.perf_counter() - started)
        for i, said in enumerate(new):
            if said:
                now = delays_of[i][step]
                words_of[i] += said
                delays[i] += [now] * len(said)
                elapsed[i] += [now + spent if is_timed else 0] * len(said)
    return [
        Instance(
            prediction=" ".join(words),
            reference=sentence.target,
            delays=delay,
            source_length=ends[-1] if ends else 0,
            elapsed=times,
            source=sentence.source,
        )
        for sentence, words, delay, times, ends in zip(
            sentences, words_of, delays, elapsed, delays_of, strict=True
        )
    ]


def run_simuleval(
    config: EvalConfig, sentences: Sequence[Sentence], policy: str, folder: Path
) -> list[Instance]:
    """Have SimulEval run our agent, from its own command line."""
    source, target = write_simuleval(folder, "test", sentences)
    is_speech = sentences[0].audio is not None
    agent = "SpeechAgent" if is_speech else "TextAgent"
    command = [sys.executable, "-c", "from simuleval.cli import main; main()"]
    command += ["--agent-class", f"leap.tasks.simul.agents.{agent}"]
    command += ["--run", str(config.run), "--policy", policy, "--beam", str(config.beam)]
    command += ["--source", str(source), "--target", str(target), "--output", str(folder)]
    command += ["--quality-metrics", "BLEU", "--latency-metrics", "LAAL", "AL", "DAL", "AP"]
    command += ["--sacrebleu-tokenizer", config.tokenize, "--no-progress-bar"]
    if is_speech:
        command += ["--source-segment-size", str(config.segment)]
    if config.chunk_size is not None:
        command += ["--chunk-size", str(config.chunk_size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise LeapError(f"SimulEval failed: {last}")
    return read_instances(folder / "instances.log")


def tables(found: Sequence[Evaluated]) -> list[Table]:
    """The scores; where it was measured, latency with computing; and what OmniSTEval found."""
    is_speech = any(each.real_time_factor is not None for each in found)
    columns, rows = ["policy", *METRICS], []
    for each in found:
        values = {"BLEU": each.scores.bleu, "chrF": each.scores.chrf, **each.scores.latency}
        rows.append([each.name, *_numbers(values, METRICS)])
        if is_speech:
            factor = each.real_time_factor
            rows[-1].append("" if factor is None else f"{factor:.3f}")
    shown = [Table("", columns + ["RTF"] * is_speech, rows)]
    timed = [each for each in found if each.scores.computation_aware]
    latencies = [name for name in METRICS if name in LATENCIES]
    for title, series in (
        ("With all computing added (CA)", [each.scores.computation_aware for each in timed]),
        ("With computing in real time", [each.scores.real_time for each in timed]),
    ):
        rows = [
            [each.name, *_numbers(values, latencies)]
            for each, values in zip(timed, series, strict=True)
        ]
        shown += [Table(title, ["policy", *latencies], rows)] if rows else []
    rows = [[each.name, *_numbers(each.omnisteval, METRICS)] for each in found if each.omnisteval]
    shown += [Table("OmniSTEval", columns, rows)] if rows else []
    return shown


def notes(found: Sequence[Evaluated]) -> list[str]:
    """What the tables do not tell."""
    lines = [f"{each.name}: {each.note}" for each in found if each.note]
    for each in found:
        empty, total = each.scores.empty, each.scores.sentences
        if empty:
            lines.append(
                f"{each.name}: {empty} of {total} sentences have no translation, and so no latency"
            )
    return lines


def _numbers(values: Mapping[str, float], names: Sequence[str]) -> list[str]:
    found = (values.get(name, math.nan) for name in names)
    return ["" if math.isnan(value) else f"{value:.2f}" for value in found]


def _write_log(path: Path, instances: Sequence[Instance]) -> None:
    lines = [json.dumps(_logged(instance)) for instance in instances]
    write_whole(path, "".join(f"{line}\n" for line in lines))


def _write(task: Task, found: Sequence[Evaluated]) -> None:
    config, unit = task.config, task.unit
    results = []
    for each in found:
        positions, seconds, sizes = cost_curve(each.steps)
        cost = {f"{unit}_read": positions, "step_seconds": seconds, "state_bytes": sizes}
        results.append(
            {
                "policy": each.name,
                "seconds": each.seconds,
                "real_time_factor": each.real_time_factor,
                **each.scores.to_json(),
                "omnisteval": each.omnisteval and without_nan(each.omnisteval),
                "cost": cost if each.steps else None,
                "note": each.note,
            }
        )
    facts = {"config": asdict(config), "part": task.part, "unit": unit, "results": results}
    write_json(config.output / "results.json", facts)
    parts: list[str | Table] = [*tables(found)]
    parts.append(
        f"{found[0].scores.sentences} sentences of {task.part}, latency in {unit}"
        + (f"; beam {config.beam} at the end\n\n" if config.beam > 1 else "\n\n")
        + "\n".join(f"    {line}" for line in signatures(found[0].scores))
    )
    if lines := notes(found):
        parts.append("\n".join(f"- {line}" for line in lines))
    write_whole(config.output / "results.md", markdown(*parts))
    title = f"{config.run.name} on {task.part}"
    _plot(found, unit, title).savefig(config.output / "curve.png", dpi=150)
    if config.long_form is not None:
        curves = {each.name: each.steps for each in found}
        plot_cost(curves, unit, title).savefig(config.output / "cost.png", dpi=150)


def signatures(scores: Scores) -> list[str]:
    """How sacrebleu came to its scores, in its own words."""
    return [f"BLEU {scores.bleu_signature}", f"chrF {scores.chrf_signature}"]


def _plot(found: Sequence[Evaluated], unit: str, title: str) -> Figure:
    points = {
        each.name: (each.scores.latency["LAAL"], each.scores.bleu)
        for each in found
        if each.scores.latency
    }
    lines = {
        family: {name: points[name] for name in names}
        for family, names in families(list(points)).items()
    }
    return plot_quality(lines, unit, title, named=list(lines))


def _size(sentence: Sentence) -> int:
    return sentence.n_frames or len(sentence.source.split())


def _logged(instance: Instance) -> dict[str, Any]:
    found = asdict(instance) | {"prediction_length": len(instance.delays)}
    if instance.end is None:  # Not part of a stream: only what SimulEval writes.
        del found["end"], found["times"]
    return found
