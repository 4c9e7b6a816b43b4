"""CoVoST 2: translations of Common Voice's recordings, to be joined with what that has of them.

covost_v2.en_de.tsv     path, translation, split, client_id
validated.tsv           path, sentence, client_id
clips/                  the recordings, mp3 at 48 kHz
"""

from pathlib import Path

from leap.errors import FileError
from leap.tasks.simul.audio.files import Audio
from leap.tasks.simul.corpora.corpus import PARTS, Corpus, Reader, Sentence, link_recording
from leap.tasks.simul.corpora.s2t import count_frames, read_table, write_table

TRANSLATIONS = ("path", "translation", "split", "client_id")
TRANSCRIPTS = ("path", "sentence", "client_id")
SPLITS = PARTS | {"train_covost": "train"}


def read_covost(folder: Path, source: str = "en", target: str = "de") -> Corpus:
    """Read CoVoST 2. Sentences without a recording or a transcript are left out.

    Args:
        folder: of Common Voice in one language, with CoVoST's table in it.
        source, target: languages.
    """
    table = folder / f"covost_v2.{source}_{target}.tsv"
    translations = read_table(table, TRANSLATIONS)
    transcripts = {
        row["path"]: row["sentence"] for row in read_table(folder / "validated.tsv", TRANSCRIPTS)
    }
    reader = Reader()
    for number, row in enumerate(translations, start=2):
        name = row["path"]
        with reader.sentence(f"line {number} of {table.name}"):
            if name not in transcripts:
                raise FileError(f"validated.tsv has no transcript of {name}")
            audio = Audio(folder / "clips" / name)
            sentence = Sentence(
                transcripts[name],
                row["translation"],
                id=Path(name).stem,
                audio=audio,
                n_frames=count_frames(audio),
                speaker=row["client_id"],
            )
            reader.add(SPLITS.get(row["split"], row["split"]), sentence)
    return reader.corpus(str(folder), source, target)


def write_covost(corpus: Corpus, folder: Path) -> None:
    """Write both tables as CoVoST 2 and Common Voice have them, with links to the recordings."""
    (folder / "clips").mkdir(parents=True, exist_ok=True)
    rows = []
    for part, sentences in corpus.parts.items():
        for sentence in sentences:
            audio = sentence.audio
            if audio is None or audio.holds_features or audio.length is not None:
                raise FileError(
                    f"sentence {sentence.id} has no recording of its own, which CoVoST needs"
                )
            rows.append(
                {
                    "path": link_recording(audio.path, folder / "clips"),
                    "translation": sentence.target,
                    "sentence": sentence.source,
                    "split": {"valid": "dev"}.get(part, part),
                    "client_id": sentence.speaker,
                }
            )
    pair = f"{corpus.source_language}_{corpus.target_language}"
    for name, columns in (
        (f"covost_v2.{pair}.tsv", TRANSLATIONS),
        ("validated.tsv", TRANSCRIPTS),
    ):
        write_table(
            folder / name, columns, ({column: row[column] for column in columns} for row in rows)
        )
