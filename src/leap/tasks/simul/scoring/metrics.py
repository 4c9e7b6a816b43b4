"""How good a translation is, and how late each of its words came.

With d_i the delay of word i (what had been read when it was written: words, or milliseconds of
sound), X the source's length, Y the reference's and H the translation's in words, and n the first i
with d_i >= X (else H):

    AL    = 1/n sum_{i<=n} d_i - (i - 1) X / Y
    LAAL  = the same with X / max(Y, H)
    AP    = sum_i d_i / (X Y)
    DAL   = 1/H sum_i d'_i - (i - 1) X / H       d'_i = max(d_i, d'_{i-1} + X / H)
    YAAL  = LAAL over the words with d_i < X alone; undefined if there is none

Of a sentence that is part of a stream (`leap.tasks.simul.scoring.longform`) delays count from its
beginning, and YAAL goes on to the end of the stream.

OmniSTEval computes them, and SimulEval 1.1.4 has the same numbers. Computing that goes on while
listening (`real_time`) is ours, as neither knows of it.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from leap.errors import ConfigError, FileError, InputError
from leap.extras import install_command

Amount = int | float
"""Of source, and so of delay: words, or milliseconds of sound."""
Delays = Sequence[Amount]


LATENCIES = ("AL", "LAAL", "AP", "DAL", "YAAL")
METRICS = ("BLEU", "chrF", "LAAL", "AL", "DAL", "AP", "YAAL")
"""In the order in which they are shown."""


def latency(
    times: Delays, source: Amount, reference: str | None = None, end: Amount | None = None
) -> dict[str, Amount]:
    """Every metric of a sentence; NaN where it is undefined.

    Args:
        times: of the words of the translation, one or more.
        source: length of the source, in the unit of the times.
        reference: by default as long as the translation.
        end: of the stream that the sentence is part of, if it is, counted from its own beginning.
    """
    omnisteval = _import("omnisteval")
    sentence = omnisteval.Instance(
        reference=reference,
        source_length=source,
        emission_cu=list(times),
        time_to_recording_end=end,
        longform=end is not None,
    )
    return {name: getattr(omnisteval.scoring, f"{name}Scorer")()([sentence]) for name in LATENCIES}


def real_time(delays: Delays, elapsed: Delays) -> list[Amount]:
    """When each word really came, if computing went on while listening.

    SimulEval's `elapsed` adds all computing so far to what was heard, as if nobody had spoken
    meanwhile, so it grows without end in long streams. Here computing waits for the sound, or for
    the computing before it, whichever is later:

        c_i = (elapsed - delay)_i - (elapsed - delay)_{i-1}      E_i = max(delay_i, E_{i-1}) + c_i
    """
    times: list[Amount] = []
    spent: Amount = 0
    for delay, total in zip(delays, elapsed, strict=True):
        cost, spent = total - delay - spent, total - delay
        times.append(max(delay, times[-1] if times else 0) + cost)
    return times


@dataclass(frozen=True)
class Instance:
    """A translated sentence, as SimulEval logs it."""

    prediction: str
    reference: str
    delays: Delays
    """Of each word of the prediction: words, or milliseconds of sound, read before it."""
    source_length: Amount
    """In the unit of the delays."""
    elapsed: Delays = ()
    """Of each word, its delay and all computing up to it, in milliseconds; empty if not measured,
    as for text."""
    index: int = 0
    source: Any = ""
    times: Delays = ()
    """Of a sentence that is part of a stream: when each word really came (`real_time`)."""
    end: Amount | None = None
    """Of a sentence that is part of a stream: where the stream ends, from the sentence's start."""

    @property
    def is_timed(self) -> bool:
        """Whether computing was measured."""
        return any(self.elapsed)

    @property
    def computing(self) -> Amount:
        """Milliseconds of it up to the last word, if it was measured."""
        return self.elapsed[-1] - self.delays[-1] if self.is_timed else 0

    def latency(self, times: Delays | None = None) -> dict[str, Amount]:
        """Every metric of this sentence.

        Args:
            times: of each word; the delays unless given.
        """
        times = self.delays if times is None else times
        if not times:
            raise InputError(f"sentence {self.index} has no words, so no word has a delay")
        return latency(times, self.source_length, self.reference, self.end)


@dataclass(frozen=True)
class Scores:
    """Quality and latency of many sentences, the latency averaged over them."""

    bleu: float
    chrf: float
    latency: dict[str, Amount]
    """By the delays alone."""
    computation_aware: dict[str, Amount] = field(default_factory=dict)
    """With all computing added, as SimulEval has it; empty unless measured of all sentences."""
    real_time: dict[str, Amount] = field(default_factory=dict)
    """With computing going on while listening (`real_time`)."""
    sentences: int = 0
    empty: int = 0
    """Sentences without a translation: they count for quality, but have no latency."""
    bleu_signature: str = ""
    chrf_signature: str = ""

    def to_json(self) -> dict[str, Any]:
        """For a file; what is undefined is null there."""
        found = asdict(self)
        for kind in ("latency", "computation_aware", "real_time"):
            found[kind] = without_nan(found[kind])
        return found


def without_nan(values: Mapping[str, Amount]) -> dict[str, Amount | None]:
    """The same with None for what is undefined, as JSON has it."""
    return {name: None if math.isnan(value) else value for name, value in values.items()}


def score(instances: Sequence[Instance], tokenize: str = "13a") -> Scores:
    """Measure many sentences.

    Args:
        instances: with their references.
        tokenize: sacrebleu's name of how BLEU cuts words: `13a`, `zh`, `ja-mecab`, `char`, ...
    """
    if not instances:
        raise InputError("there are no sentences to score")
    sacrebleu = _import("sacrebleu.metrics")
    predictions = [instance.prediction for instance in instances]
    references = [[instance.reference for instance in instances]]
    if tokenize not in sacrebleu.BLEU.TOKENIZERS:
        raise ConfigError(
            f"tokenize={tokenize!r} is not known to sacrebleu; it has "
            f"{', '.join(sacrebleu.BLEU.TOKENIZERS)}"
        )
    bleu, chrf = sacrebleu.BLEU(tokenize=tokenize), sacrebleu.CHRF()
    written = [instance for instance in instances if instance.delays]
    timed = written if all(instance.is_timed for instance in written) else []
    return Scores(
        bleu=bleu.corpus_score(predictions, references).score,
        chrf=chrf.corpus_score(predictions, references).score,
        latency=_mean(instance.latency() for instance in written),
        computation_aware=_mean(instance.latency(instance.elapsed) for instance in timed),
        real_time=_mean(
            instance.latency(instance.times or real_time(instance.delays, instance.elapsed))
            for instance in timed
        ),
        sentences=len(instances),
        empty=len(instances) - len(written),
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
    )


def read_instances(path: Path) -> list[Instance]:
    """The sentences of SimulEval's `instances.log`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"cannot read {path}, which SimulEval should have written") from error
    instances = []
    for number, line in enumerate(lines, start=1):
        try:
            found = json.loads(line)
            instances.append(
                Instance(
                    prediction=found["prediction"],
                    reference=found["reference"],
                    delays=found["delays"],
                    source_length=found["source_length"],
                    elapsed=found["elapsed"],
                    index=found["index"],
                    source=found["source"],
                )
            )
        except (ValueError, KeyError, TypeError) as error:
            raise FileError(f"line {number} of {path} is no instance of SimulEval's") from error
    return instances


def _mean(latencies: Iterable[dict[str, Amount]]) -> dict[str, Amount]:
    """The mean of each metric over the sentences that have it."""
    found = list(latencies)
    if not found:
        return {}
    means = {}
    for name in LATENCIES:
        values = [latency[name] for latency in found if not math.isnan(latency[name])]
        means[name] = sum(values) / len(values) if values else math.nan
    return means


def _import(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(f"scores need {name}: {install_command('simul')}") from error
