"""MuST-C: talks in `en-de/data/<part>/wav`, and in `txt` a line of each language a segment.

    - {duration: 3.5, offset: 16.08, speaker_id: spk.1, wav: ted_1.wav}

A list of these, `<part>.yaml`, says where in the talk each segment is. The same file tells
OmniSTEval and others how to cut a long recording.
"""

from functools import cache
from math import inf
from pathlib import Path
from typing import Any

from leap.errors import FileError, first_line
from leap.tasks.files import read_text
from leap.tasks.simul.audio.files import Audio, sound_facts
from leap.tasks.simul.corpora.corpus import PARTS, Corpus, Reader, Sentence, link_recording
from leap.tasks.simul.corpora.s2t import count_frames

KEYS = ("wav", "offset", "duration")
DEEPEST = 8
"""Lists and mappings within each other; segments need two."""


def read_must_c(folder: Path, source: str = "en", target: str = "de") -> Corpus:
    """Read MuST-C. Segments of a talk whose recording is missing are left out.

    Args:
        folder: that of the pair, `en-de`, or the one it is in.
        source, target: languages.
    """
    pair = folder / f"{source}-{target}"
    data = (pair if pair.is_dir() else folder) / "data"
    if not data.is_dir():
        raise FileError(f"no MuST-C at {folder}: there is no {data}")
    reader = Reader()
    rate_of = cache(lambda path: sound_facts(path)[1])
    for split in sorted(path for path in data.iterdir() if (path / "txt").is_dir()):
        name = split.name
        segments = read_segments(split / "txt" / f"{name}.yaml")
        texts = [_lines(split / "txt" / f"{name}.{language}") for language in (source, target)]
        for lines, language in zip(texts, (source, target), strict=True):
            if len(lines) != len(segments):
                raise FileError(
                    f"{name}.{language} in {split / 'txt'} has {len(lines)} lines, but "
                    f"{name}.yaml has {len(segments)} segments"
                )
        for number, (segment, left, right) in enumerate(zip(segments, *texts, strict=True)):
            with reader.sentence(f"segment {number + 1} of {name}"):
                wav, offset, duration = _checked(segment)
                path = split / "wav" / wav
                rate = rate_of(path)
                audio = Audio(path, round(offset * rate), round(duration * rate))
                sentence = Sentence(
                    left,
                    right,
                    id=f"{path.stem}_{number}",
                    audio=audio,
                    n_frames=count_frames(audio),
                    speaker=str(segment.get("speaker_id", "")),
                )
                reader.add(PARTS.get(name, name), sentence)
    return reader.corpus(str(folder), source, target)


def write_must_c(corpus: Corpus, folder: Path) -> None:
    """Write segments and lines as MuST-C has them; recordings stay where they are, linked to."""
    pair = folder / f"{corpus.source_language}-{corpus.target_language}" / "data"
    for part, sentences in corpus.parts.items():
        name = {"valid": "dev"}.get(part, part)
        for inside in ("txt", "wav"):
            (pair / name / inside).mkdir(parents=True, exist_ok=True)
        segments = []
        for sentence in sentences:
            if sentence.audio is None or sentence.audio.holds_features:
                raise FileError(f"sentence {sentence.id} has no recording, which MuST-C needs")
            audio = sentence.audio
            total, rate = sound_facts(audio.path)
            wav = link_recording(audio.path, pair / name / "wav")
            length = total - audio.start if audio.length is None else audio.length
            segments.append(
                f"- {{duration: {length / rate:.6f}, offset: {audio.start / rate:.6f}, "
                f"speaker_id: {sentence.speaker or 'unknown'}, wav: {wav}}}\n"
            )
        txt = pair / name / "txt"
        (txt / f"{name}.yaml").write_text("".join(segments), encoding="utf-8")
        for language, lines in (
            (corpus.source_language, [sentence.source for sentence in sentences]),
            (corpus.target_language, [sentence.target for sentence in sentences]),
        ):
            text = "".join(f"{line}\n" for line in lines)
            (txt / f"{name}.{language}").write_text(text, encoding="utf-8")


def read_segments(path: Path) -> list[dict[str, Any]]:
    """The segments of talks in a YAML file."""
    import yaml

    # Both build plain values only, whatever the file says; the first, if compiled, is fast.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    text, depth = read_text(path), 0
    try:
        # The loaders go into what is nested by recursion, and the fast one has no guard.
        for event in yaml.parse(text, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise FileError(f"{path} is nested too deeply for a list of segments")
        found = yaml.load(text, Loader=loader)
    except yaml.YAMLError as error:
        raise FileError(f"{path} is no YAML file ({first_line(error)})") from error
    if not isinstance(found, list):
        raise FileError(f"{path} holds no list of segments")
    for number, segment in enumerate(found, start=1):
        for key in KEYS:
            if not isinstance(segment, dict) or key not in segment:
                raise FileError(f"segment {number} of {path} has no {key}")
    return found


def _checked(segment: dict[str, Any]) -> tuple[str, float, float]:
    """Name of the recording, offset and duration, if they are such."""
    wav, offset, duration = (segment[key] for key in KEYS)
    if not isinstance(wav, str):
        raise FileError(f"its wav is {wav!r}, no name of a file")
    for key, value in (("offset", offset), ("duration", duration)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
            raise FileError(f"its {key} is {value!r}, no time in seconds")
    return wav, offset, duration


def _lines(path: Path) -> list[str]:
    return read_text(path).removesuffix("\n").split("\n")
