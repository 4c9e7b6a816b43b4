r"""The manifests of fairseq's speech-to-text tasks: a table a part, and `config.yaml` beside them.

    id  audio  n_frames  tgt_text  speaker  src_text

`audio` is a path, or a path and a stretch: `talk.wav:16000:48000` from which sample and how many,
`features.zip:57:8128` at which byte and how many. Paths are relative to the table, or absolute.
Tabs separate the columns, whose names are in the first line; the tables of CoVoST are alike.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from leap.errors import FileError
from leap.models.fbank import LeapformerFeatureExtractor
from leap.reports.files import write_whole
from leap.tasks.simul.audio.files import RATE, Audio, sound_facts
from leap.tasks.simul.corpora.corpus import PARTS, Corpus, Reader, Sentence, with_held_out

NEEDED = ("id", "audio", "n_frames", "tgt_text")
COLUMNS = (*NEEDED, "speaker", "src_text")
PIECES = "dict.txt"


class _Dialect(csv.Dialect):
    delimiter = "\t"
    quoting = csv.QUOTE_NONE
    quotechar = None
    escapechar = "\\"
    doublequote = False
    lineterminator = "\n"


def read_s2t(folder: Path, source: str = "en", target: str = "de") -> Corpus:
    """Read a folder of manifests. A sentence whose sound is missing is left out.

    Args:
        folder: with `train.tsv` and so on.
        source, target: languages.
    """
    tables = sorted(folder.glob("*.tsv"))
    if not tables:
        raise FileError(f"no manifest in {folder}, such as train.tsv")
    reader = Reader()
    for table in tables:
        for number, row in enumerate(read_table(table, NEEDED), start=2):
            with reader.sentence(f"line {number} of {table.name}"):
                reader.add(PARTS.get(table.stem, table.stem), _sentence(row, folder))
    return with_held_out(reader.corpus(str(folder), source, target))


def read_part(path: Path, root: Path | None = None) -> list[Sentence]:
    """The sentences of a manifest that `write_part` wrote, their sound not looked for.

    Args:
        path: of the manifest.
        root: folder that paths are relative to; the manifest's by default.
    """
    root = path.parent if root is None else root
    return [
        Sentence(
            row["src_text"],
            row["tgt_text"],
            id=row["id"],
            audio=parse_audio(row["audio"], root) if row["audio"] else None,
            n_frames=int(row["n_frames"]) if row["n_frames"] else None,
            speaker=row["speaker"],
        )
        for row in read_table(path, COLUMNS)
    ]


def write_part(path: Path, sentences: Sequence[Sentence], root: Path | None = None) -> None:
    """Write a manifest; of text alone, the columns of the sound stay empty.

    Args:
        path: of the manifest.
        sentences: of one part.
        root: folder that paths shall be relative to; the manifest's by default.
    """
    root = path.parent if root is None else root
    write_table(
        path,
        COLUMNS,
        (
            {
                "id": sentence.id,
                "audio": format_audio(sentence.audio, root) if sentence.audio else "",
                "n_frames": "" if sentence.n_frames is None else sentence.n_frames,
                "tgt_text": sentence.target,
                "speaker": sentence.speaker,
                "src_text": sentence.source,
            }
            for sentence in sentences
        ),
    )


def write_config(
    folder: Path,
    vocabulary: str,
    pieces: Sequence[str],
    statistics: str | None,
    n_bins: int = 80,
) -> None:
    """Write what fairseq reads beside the manifests: `config.yaml`, and `dict.txt` of subwords.

    Args:
        folder: of the manifests.
        vocabulary: path of the SentencePiece file, from there.
        pieces: its subwords, less the special ones, which fairseq puts before them itself.
        statistics: path of the npz file with mean and deviation of frames, if there is one.
        n_bins: bands of a frame.
    """
    import yaml

    transforms = ["global_cmvn"] if statistics else []
    config: dict[str, Any] = {
        "vocab_filename": PIECES,
        "bpe_tokenizer": {"bpe": "sentencepiece", "sentencepiece_model": vocabulary},
        "input_feat_per_channel": n_bins,
        "input_channels": 1,
        "transforms": {"*": transforms, "_train": [*transforms, "specaugment"]},
        "specaugment": {
            "freq_mask_F": 27,
            "freq_mask_N": 1,
            "time_mask_N": 1,
            "time_mask_T": 100,
            "time_mask_p": 1.0,
            "time_wrap_W": 0,
        },
    }
    if statistics:
        config["global_cmvn"] = {"stats_npz_path": statistics}
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    # The number is how often a subword occurs, of which fairseq's own scripts say 1, too.
    write_whole(folder / PIECES, "".join(f"{piece} 1\n" for piece in pieces))


def read_table(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a table.

    Args:
        path: of the file.
        columns: those it must have.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, dialect=_Dialect, restval="")
            found = reader.fieldnames or []
            for column in columns:
                if column not in found:
                    raise FileError(
                        f"{path} has no column {column}; it has {', '.join(found) or 'none'}"
                    )
            return list(reader)
    except FileNotFoundError as error:
        raise FileError(f"no table at {path}") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FileError(f"{path} is no table in UTF-8 ({error})") from error


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Write a table, whole or not at all."""
    unfinished = path.with_name(f".{path.name}.part")
    with unfinished.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, dialect=_Dialect)
        writer.writeheader()
        writer.writerows(rows)
    unfinished.replace(path)


def parse_audio(text: str, folder: Path) -> Audio:
    """A sound as a manifest names it."""
    path, *stretch = text.rsplit(":", 2) if text.count(":") >= 2 else [text]
    try:
        start, length = map(int, stretch) if stretch else (0, None)
    except ValueError as error:
        raise FileError(f"audio {text!r} is neither path nor path:start:length") from error
    return Audio(folder / path, start, length)


def format_audio(audio: Audio, folder: Path) -> str:
    """The name of a sound in a manifest, relative to its folder where that can be."""
    path = audio.path.resolve()
    if path.is_relative_to(folder.resolve()):
        path = path.relative_to(folder.resolve())
    return f"{path}" if audio.length is None else f"{path}:{audio.start}:{audio.length}"


def count_frames(audio: Audio) -> int:
    """How many frames of 10 ms a recording gives, by what its file says of itself."""
    total, rate = sound_facts(audio.path)
    stretch = max(0, total - audio.start)
    n_samples = stretch if audio.length is None else min(stretch, audio.length)
    n_frames = LeapformerFeatureExtractor().n_frames(n_samples * RATE // rate)
    if n_frames < 1:
        raise FileError(f"{audio.path} holds no sound{' at that place' * bool(audio.start)}")
    return n_frames


def _sentence(row: dict[str, str], folder: Path) -> Sentence:
    audio = parse_audio(row["audio"], folder)
    if not audio.path.is_file():
        raise FileError(f"no file at {audio.path}")
    if audio.holds_features:
        try:
            n_frames = int(row["n_frames"])
        except ValueError as error:
            raise FileError(f"n_frames {row['n_frames']!r} is no number") from error
    else:
        n_frames = count_frames(audio)
    return Sentence(
        row.get("src_text", ""),
        row["tgt_text"],
        id=row["id"],
        audio=audio,
        n_frames=n_frames,
        speaker=row.get("speaker", ""),
    )
