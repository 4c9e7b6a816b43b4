"""The sound of a corpus, kept in a folder as wav files or as frames, shard after shard.

audio/test/3.wav        recordings
features/train-3.zip    frames as float16
shards/train-3.tsv      which sentences these are, written last: work that is done is not redone
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal

from leap.errors import FileError
from leap.models.fbank import LeapformerFeatureExtractor
from leap.reports.files import write_whole
from leap.reports.progress import Progress, Status, silent
from leap.runtime.fbank import Frames, Samples
from leap.tasks.simul.audio.features import Statistics, load_frames
from leap.tasks.simul.audio.files import Audio, write_frames, write_sound
from leap.tasks.simul.corpora.corpus import Corpus, Reader, Sentence
from leap.tasks.simul.corpora.s2t import read_part, write_part

Store = Literal["sound", "features"]
SoundOf = Callable[[str, Sentence], tuple[Samples, str]]
SHARD = 200
"""Sentences stored at once."""
ENOUGH = 2000
"""Sentences whose frames the statistics are taken of."""


def store_speech(
    corpus: Corpus,
    folder: Path,
    sound_of: SoundOf,
    extractor: LeapformerFeatureExtractor,
    store: Store = "features",
    progress: Progress = silent,
    workers: int | None = None,
) -> Corpus:
    """Keep the sound of every sentence in a folder, or go on with it after a stop.

    Tests are always kept as recordings, for SimulEval to play.

    Args:
        corpus: whose sentences.
        folder: where.
        sound_of: gives the sound of a sentence of a part, and who speaks; or a `FileError`.
        extractor: makes the frames.
        store: what of sentences to train on is kept.
        progress: told how far this is.
        workers: threads; by default as many as there are processors.

    Returns:
        The corpus with its sound. Sentences that cannot be spoken are left out.
    """
    for name in ("features", "shards"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    total = sum(map(len, corpus.parts.values()))
    parts: dict[str, list[Sentence]] = {}
    left_out = list(corpus.left_out)
    done = 0
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        for part, sentences in corpus.parts.items():
            kept: Store = store if part in ("train", "valid") else "sound"
            parts[part] = []
            for start in range(0, len(sentences), SHARD):
                shard = sentences[start : start + SHARD]
                table = folder / "shards" / f"{part}-{start // SHARD}.tsv"
                if not table.exists():
                    heard, notes = _store_shard(
                        shard, part, start, folder, sound_of, extractor, kept, pool
                    )
                    write_whole(table.with_suffix(".txt"), "".join(f"{note}\n" for note in notes))
                    write_part(table, heard, root=folder)
                parts[part] += read_part(table, root=folder)
                left_out += table.with_suffix(".txt").read_text(encoding="utf-8").splitlines()
                done += len(shard)
                progress(Status(done, total, "sentences"))
    parts = {part: sentences for part, sentences in parts.items() if sentences}
    if not parts.get("train"):
        raise FileError(f"no sentence of {corpus.name} can be heard ({(left_out or ['?'])[0]})")
    return replace(corpus, parts=parts, left_out=left_out)


def those_heard(
    corpus: Corpus, extractor: LeapformerFeatureExtractor, progress: Progress = silent
) -> Corpus:
    """The corpus less the sentences whose sound cannot be read where it lies."""
    total = sum(map(len, corpus.parts.values()))
    reader, done = Reader(), 0
    for part, sentences in corpus.parts.items():
        for sentence in sentences:
            with reader.sentence(f"{part} {sentence.id}"):
                if sentence.audio is None:
                    raise FileError("it has no sound")
                load_frames(sentence.audio, extractor)
                reader.parts.setdefault(part, []).append(sentence)
            done += 1
            progress(Status(done, total, "sentences"))
    return replace(corpus, parts=reader.parts, left_out=[*corpus.left_out, *reader.left_out])


def estimate(sentences: Sequence[Sentence], extractor: LeapformerFeatureExtractor) -> Statistics:
    """Mean and deviation of frames, over some thousand sentences spread over all."""
    statistics = Statistics(extractor.feature_size)
    for sentence in sentences[:: max(1, len(sentences) // ENOUGH)]:
        assert sentence.audio is not None
        statistics.add(load_frames(sentence.audio, extractor))
    return statistics


def _store_shard(
    sentences: Sequence[Sentence],
    part: str,
    start: int,
    folder: Path,
    sound_of: SoundOf,
    extractor: LeapformerFeatureExtractor,
    store: Store,
    pool: ThreadPoolExecutor,
) -> tuple[list[Sentence], list[str]]:
    """Store the sound of sentences, and give those that have one, and notes on the others."""

    def work(place: int, sentence: Sentence) -> tuple[Sentence, Frames | None] | str:
        try:
            sound, who = sound_of(part, sentence)
            n_frames = extractor.n_frames(len(sound))
            if n_frames < 1:
                raise FileError("it is too short for a single frame of 10 ms")
        except FileError as error:
            return f"{part} {sentence.id}: {error}"
        heard = replace(sentence, n_frames=n_frames, speaker=sentence.speaker or who)
        if store == "features":
            return heard, extractor.frames(sound)
        path = folder / "audio" / part / f"{place}.wav"
        unfinished = path.with_suffix(".part")
        write_sound(unfinished, sound)
        unfinished.replace(path)
        return replace(heard, audio=Audio(path)), None

    (folder / "audio" / part).mkdir(parents=True, exist_ok=True)
    found = list(pool.map(work, range(start, start + len(sentences)), sentences))
    heard = [each for each in found if not isinstance(each, str)]
    notes = [each for each in found if isinstance(each, str)]
    frames = {f"{i}": values for i, (_, values) in enumerate(heard) if values is not None}
    if not frames:
        return [sentence for sentence, _ in heard], notes
    places = write_frames(folder / "features" / f"{part}-{start // SHARD}.zip", frames)
    return [
        replace(sentence, audio=place) for (sentence, _), place in zip(heard, places, strict=True)
    ], notes
