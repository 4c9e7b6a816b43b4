"""Asterisk's prompts: a telephone exchange's sentences, read by one speaker, and translated.

    prompts.tsv                    id, seconds, en, es, fr, it, ru; an empty cell has no text
    en_US_f_Allison.wav.tar.xz     en_US_f_Allison/<id>.wav, 8 kHz

Half an hour of real speech, so that all of the pipeline can be tried on some; too little to learn
to translate by.
"""

import lzma
import tarfile
from pathlib import Path

from leap.errors import FileError, first_line
from leap.runtime.fbank import Samples
from leap.tasks.files import data_folder
from leap.tasks.simul.audio.files import decode_sound
from leap.tasks.simul.corpora.corpus import Corpus, Reader, Sentence, with_held_out
from leap.tasks.simul.corpora.s2t import read_table
from leap.tasks.simul.corpora.speech import SoundOf

SPEAKER = "en_US_f_Allison"
TARGETS = ("es", "fr", "it", "ru")
SHARE = 0.1
"""Of the prompts that is held out, in each part."""


def read_prompts(target: str, folder: Path | None = None) -> Corpus:
    """What is said in the prompts, with translations; those without one are left out.

    Args:
        target: es, fr, it or ru.
        folder: of the table; by default that in the folder of data sets.
    """
    reader = Reader()
    for row in read_table(_folder(folder) / "prompts.tsv", ("id", "en", target)):
        with reader.sentence(row["id"]):
            reader.add("train", Sentence(row["en"], row[target], row["id"], speaker=SPEAKER))
    return with_held_out(reader.corpus("asterisk-prompts", "en", target), SHARE)


def prompts_sound(folder: Path | None = None) -> SoundOf:
    """What gives the recordings, by the prompts' names; it holds all of them, as they are few."""
    packed = _folder(folder) / f"{SPEAKER}.wav.tar.xz"
    recordings: dict[str, bytes] = {}
    try:
        with tarfile.open(packed) as archive:
            for member in archive:
                file = archive.extractfile(member)
                if file is not None:
                    recordings[member.name] = file.read()
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError) as error:
        raise FileError(f"no recordings can be read from {packed} ({first_line(error)})") from error

    def sound_of(part: str, sentence: Sentence) -> tuple[Samples, str]:
        name = f"{SPEAKER}/{sentence.id}.wav"
        if name not in recordings:
            raise FileError(f"{packed} holds no {name}")
        return decode_sound(recordings[name]), SPEAKER

    return sound_of


def _folder(given: Path | None) -> Path:
    folder = given or data_folder() / "asterisk-prompts"
    if not folder.is_dir():
        raise FileError(
            f"no Asterisk prompts at {folder}; put prompts.tsv and the recordings there, or name "
            "another folder of data sets by LEAP_DATA"
        )
    return folder
