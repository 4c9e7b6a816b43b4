"""OmniSTEval's own command on our logs: it reads, cuts and scores them, with the same figures."""

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from leap.errors import ConfigError, FileError, LeapError
from leap.extras import install_command
from leap.reports.files import write_whole
from leap.tasks.files import read_text
from leap.tasks.simul.scoring.longform import Translated
from leap.tasks.simul.scoring.metrics import METRICS


def check_installed() -> None:
    """Raises ConfigError if OmniSTEval is not installed."""
    if find_spec("omnisteval") is None:
        raise ConfigError(f"OmniSTEval is not installed: {install_command('simul')}")


def score_sentences(log: Path, tokenize: str) -> dict[str, float]:
    """Its scores of the sentences in an `instances.log`, which has their references.

    Args:
        log: as SimulEval writes it. OmniSTEval's report goes into a folder beside it.
        tokenize: sacrebleu's way to cut words.
    """
    lines = read_text(log).splitlines()
    references = [json.loads(line)["reference"] for line in lines]
    return _run(log, "shortform", references, [], tokenize)


def score_streams(log: Path, streams: Sequence[Translated], tokenize: str) -> dict[str, float]:
    """The same of streams, which it cuts into sentences itself.

    Args:
        log: an instance for each stream.
        streams: in the same order.
        tokenize: sacrebleu's way to cut words.
    """
    # It knows only of seconds, which it makes milliseconds: of text, let those be words.
    spans = [
        {"wav": f"stream-{i}", "offset": begin / 1000, "duration": length / 1000}
        for i, stream in enumerate(streams)
        for begin, length in stream.spans
    ]
    path = log.parent / "segments.json"
    write_whole(path, json.dumps(spans))
    references = [sentence.target for stream in streams for sentence in stream.sentences]
    return _run(log, "longform", references, ["--speech_segmentation", str(path)], tokenize)


def _run(
    log: Path, form: str, references: Sequence[str], options: list[str], tokenize: str
) -> dict[str, float]:
    check_installed()
    folder = log.parent / "omnisteval"
    target = log.parent / "references.txt"
    write_whole(target, "".join(f"{line.strip()}\n" for line in references))
    command = [sys.executable, "-m", "omnisteval.cli", form, "--word_level"]
    command += ["--hypothesis_file", str(log), "--ref_sentences_file", str(target), *options]
    command += ["--bleu_tokenizer", tokenize, "--output_folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise LeapError(f"OmniSTEval failed: {last}")
    return _scores(folder / "scores.tsv")


def _scores(path: Path) -> dict[str, float]:
    """By our names, those without computing."""
    found = dict(line.split("\t") for line in read_text(path).splitlines()[1:])
    scores = {}
    for name in METRICS:
        names = (name, f"{name} (CU)", f"Long{name} (CU)")
        value = next((found[each] for each in names if each in found), None)
        if value is None:
            raise FileError(f"{path} has no {name}; OmniSTEval 0.1.7 to 0.1.10 write it")
        scores[name] = float(value)
    return scores
