"""Quality against latency: a test translated under several policies, and scored.

Sentences are translated many at a time (`StreamPool`), or by SimulEval with our agent, which gives
the same words with the same delays. The scores are ours, of the log of either.

    results.json, results.md    the scores
    curve.png                   quality against latency
    <policy>/instances.log      each sentence as SimulEval logs it, for other tools
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure

from leap.errors import ConfigError, LeapError
from leap.tasks.simul.audio import read_sound
from leap.tasks.simul.corpus import Sentence
from leap.tasks.simul.metrics import Instance, Scores, read_instances, score
from leap.tasks.simul.paths import Wait
from leap.tasks.simul.policies import read_policy, waiting
from leap.tasks.simul.prepare import load_prepared
from leap.tasks.simul.simuleval import write_simuleval
from leap.tasks.simul.stream import Interpreter, load_interpreter
from leap.training.folder import write_json, write_whole
from leap.training.table import markdown_table

Progress = Callable[[str, int, int], None]
COLUMNS = ("BLEU", "chrF", "LAAL", "AL", "DAL", "AP", "YAAL")


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
    """Waits of wait-k, in pieces of text, or in steps of the ratio of speech; or offline."""
    policies: tuple[str, ...] = ()
    """Further policies: agree-2, align-2, tail-0.3, ..."""
    ratio: int | None = None
    """Source states to a target piece, of wait-k; by default 1 for text, 4 for speech."""
    chunk_size: int | None = None
    """States read at once; by default 1 of text, 4 of speech, and offline all."""
    segment: int = 320
    """Of speech: milliseconds that come at once."""
    limit: int | None = None
    """Sentences to translate, the first ones; by default all."""
    engine: Literal["pool", "simuleval"] = "pool"
    """What runs the streams: we do, many at a time, or SimulEval, one after another."""
    batch: int = 64
    """Streams in a pool. With 1, computing is timed, for computation-aware latency."""
    tokenize: str = "13a"
    """sacrebleu's way to cut words for BLEU."""
    output: Path = Path("runs/simul-eval")
    """Folder to write."""

    def __post_init__(self) -> None:
        for name in ("segment", "batch", "limit", "ratio"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more")
        if not self.waits and not self.policies:
            raise ConfigError("nothing to evaluate: give one or more waits or policies")


@dataclass(frozen=True)
class Evaluated:
    """What came out under one policy."""

    policy: str
    scores: Scores
    seconds: float
    """Computing, over all sentences."""
    real_time_factor: float | None
    """Of speech: computing over sound; with a pool, over the sound of all its streams."""


def evaluate(config: EvalConfig, progress: Progress | None = None) -> list[Evaluated]:
    """Translate and score under every policy, and write the results."""
    prepared = load_prepared(config.data)
    tests = [part for part in prepared.parts if part not in ("train", "valid")]
    part = config.part or (tests[0] if tests else "valid")
    sentences = prepared.sentences(part)[: config.limit]
    is_speech = prepared.extractor is not None
    ratio = config.ratio or (4 if is_speech else 1)
    policies = [waiting(wait, ratio) for wait in config.waits]
    policies += [read_policy(name, ratio) for name in config.policies]
    found = []
    for policy in policies:
        folder = config.output / policy.name.replace("/", "-")
        folder.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        if config.engine == "simuleval":
            instances = run_simuleval(config, sentences, policy.name, folder)
        else:
            interpreter = load_interpreter(config.run, policy, chunk_size=config.chunk_size)
            if (interpreter.extractor is not None) != is_speech:
                raise ConfigError(f"{config.run} and {config.data} are not of one kind of source")
            started = time.perf_counter()

            def tell(done: int, name: str = policy.name) -> None:
                if progress is not None:
                    progress(name, done, len(sentences))

            instances = translate(
                interpreter, sentences, batch=config.batch, segment=config.segment, tell=tell
            )
            lines = [json.dumps(_logged(instance)) for instance in instances]
            write_whole(folder / "instances.log", "".join(f"{line}\n" for line in lines))
        seconds = time.perf_counter() - started
        heard = sum(float(each.source_length) for each in instances) / 1000
        found.append(
            Evaluated(
                policy.name,
                score(instances, config.tokenize),
                seconds,
                seconds / heard if is_speech else None,
            )
        )
        _write(config, part, found, "ms" if is_speech else "words")
    return found


def translate(
    interpreter: Interpreter,
    sentences: Sequence[Sentence],
    *,
    batch: int = 64,
    segment: int = 320,
    tell: Callable[[int], None] = lambda done: None,
) -> list[Instance]:
    """Stream sentences, many at a time: what SimulEval would log of each.

    Args:
        interpreter: the model with its policy.
        sentences: text goes in word by word; of speech, so many milliseconds at a time.
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
            chosen, _together(interpreter, [sentences[i] for i in chosen], segment), strict=True
        ):
            instances[i] = replace(instance, index=i)
        tell(len(instances))
    return [instances[i] for i in range(len(sentences))]


def _together(
    interpreter: Interpreter, sentences: Sequence[Sentence], segment: int
) -> list[Instance]:
    parts: list[list[Any]] = []
    delays_of: list[list[float]] = []
    for sentence in sentences:
        if interpreter.extractor is None:
            words = sentence.source.split()
            parts.append([[word] for word in words])
            delays_of.append(list(range(1, len(words) + 1)))
        else:
            if sentence.audio is None:
                raise ConfigError(f"sentence {sentence.id} is not spoken")
            rate = interpreter.extractor.sampling_rate
            sound = read_sound(sentence.audio, rate)
            size = -(-segment * rate // 1000)
            ends = [min(end, len(sound)) for end in range(size, len(sound) + size, size)]
            parts.append([sound[end - 1 - (end - 1) % size : end] for end in ends])
            delays_of.append([end * 1000 / rate for end in ends])
    pool = interpreter.pool(len(sentences))
    words_of: list[list[str]] = [[] for _ in sentences]
    delays: list[list[float]] = [[] for _ in sentences]
    elapsed: list[list[float]] = [[] for _ in sentences]
    is_timed = len(sentences) == 1 and interpreter.extractor is not None
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
    command += ["--run", str(config.run), "--policy", policy]
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


def table(found: Sequence[Evaluated]) -> tuple[list[str], list[list[str]]]:
    """The scores, a row for each policy."""
    timed = any(each.scores.computation_aware for each in found)
    is_speech = any(each.real_time_factor is not None for each in found)
    columns = ["policy", *COLUMNS]
    columns += ["LAAL_CA", "LAAL real time"] if timed else []
    columns += ["RTF"] if is_speech else []
    rows = []
    for each in found:
        scores = each.scores
        values = {"BLEU": scores.bleu, "chrF": scores.chrf, **scores.latency}
        row = [each.policy, *(f"{values.get(name, float('nan')):.2f}" for name in COLUMNS)]
        for series in (scores.computation_aware, scores.real_time) if timed else ():
            row.append(f"{series.get('LAAL', float('nan')):.2f}")
        if is_speech:
            row.append(f"{each.real_time_factor:.3f}")
        rows.append(row)
    return columns, rows


def _write(config: EvalConfig, part: str, found: Sequence[Evaluated], unit: str) -> None:
    results = [
        {
            "policy": each.policy,
            "seconds": each.seconds,
            "real_time_factor": each.real_time_factor,
            **each.scores.to_json(),
        }
        for each in found
    ]
    facts = {"config": asdict(config), "part": part, "unit": unit, "results": results}
    write_json(config.output / "results.json", facts)
    signature = found[0].scores.bleu_signature
    text = f"{found[0].scores.sentences} sentences of {part}, latency in {unit}, {signature}"
    write_whole(config.output / "results.md", f"{markdown_table(*table(found))}\n\n{text}\n")
    _plot(found, unit, f"{config.run.name} on {part}").savefig(config.output / "curve.png", dpi=150)


def _plot(found: Sequence[Evaluated], unit: str, title: str) -> Figure:
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    points = [(each.scores.latency.get("LAAL", 0), each.scores.bleu) for each in found]
    axes.plot(*zip(*sorted(points), strict=True), marker="o", color="#d55e00")
    for each, point in zip(found, points, strict=True):
        axes.annotate(each.policy, point, xytext=(5, -12), textcoords="offset points", fontsize=8)
    axes.set_xlabel(f"latency: LAAL ({unit})")
    axes.set_ylabel("quality: BLEU")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    return figure


def _size(sentence: Sentence) -> int:
    return sentence.n_frames or len(sentence.source.split())


def _logged(instance: Instance) -> dict[str, Any]:
    found = asdict(instance)
    return found | {"prediction_length": len(instance.delays)}
