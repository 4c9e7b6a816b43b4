"""A test as SimulEval reads it: a file with a source on each line, and one with the references."""

from collections.abc import Sequence
from pathlib import Path

from leap.errors import InputError
from leap.reports.files import write_whole
from leap.tasks.simul.audio.files import read_sound, write_sound
from leap.tasks.simul.corpora.corpus import Sentence


def write_simuleval(folder: Path, part: str, sentences: Sequence[Sentence]) -> tuple[Path, Path]:
    """Write the two files, `<part>.source` and `<part>.target`.

    A source is a sentence, or the path of a recording; of a stretch of a longer one, a copy is
    written.

    Returns:
        The files' paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if len({sentence.audio is None for sentence in sentences}) > 1:
        raise InputError(f"some sentences of {part} are recordings, and some are not")
    sources = []
    for number, sentence in enumerate(sentences):
        audio = sentence.audio
        if audio is None:
            sources.append(sentence.source)
        elif audio.holds_features:
            raise InputError(f"sentence {sentence.id} of {part} has frames, but no recording")
        elif audio.length is None:
            sources.append(str(audio.path.resolve()))
        else:
            path = folder / part / f"{number}.wav"
            path.parent.mkdir(exist_ok=True)
            write_sound(path, read_sound(audio))
            sources.append(str(path.resolve()))
    files = folder / f"{part}.source", folder / f"{part}.target"
    for path, lines in zip(files, (sources, [s.target for s in sentences]), strict=True):
        write_whole(path, "".join(f"{line}\n" for line in lines))
    return files
