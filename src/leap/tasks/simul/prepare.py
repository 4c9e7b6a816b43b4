"""Preparing a corpus: from text or recordings to a folder that training and evaluation read.

config.json, data.json   the settings, and a digest of the text
vocabulary/              subwords of both languages
extractor/               how sound becomes frames, with their statistics
gcmvn.npz, config.yaml,
dict.txt                 the same for fairseq
features/, audio/        sound that was made, or frames of it
train.tsv, valid.tsv …   the sentences, as fairseq's manifests
simuleval/               each test as SimulEval reads it: a list of sources, one of references;
                         not of a test that was given as frames
left_out.txt             sentences that could not be read, and why
metrics.json             counts, written last: a folder that has them is finished
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from leap.errors import ConfigError, FileError, refuse_given
from leap.models.fbank import LeapformerFeatureExtractor
from leap.reports.files import write_whole
from leap.reports.progress import Progress, silent
from leap.runtime.fbank import Samples
from leap.runtime.streaming.vocabulary import SPECIAL
from leap.tasks.simul.audio.features import SpecAugment, load_sound
from leap.tasks.simul.corpora.corpus import Corpus, Sentence, texts
from leap.tasks.simul.corpora.covost import read_covost
from leap.tasks.simul.corpora.must_c import read_must_c
from leap.tasks.simul.corpora.numbers import numbers_corpus
from leap.tasks.simul.corpora.parallel import read_multi30k, read_parallel
from leap.tasks.simul.corpora.prompts import TARGETS, prompts_sound, read_prompts
from leap.tasks.simul.corpora.s2t import read_part, read_s2t, write_config, write_part
from leap.tasks.simul.corpora.speak import speaker
from leap.tasks.simul.corpora.speech import (
    SoundOf,
    Store,
    estimate,
    store_speech,
    those_heard,
)
from leap.tasks.simul.corpora.tatoeba import FILES as TATOEBA
from leap.tasks.simul.corpora.tatoeba import read_tatoeba
from leap.tasks.simul.data import SpeechPairs, TextPairs
from leap.tasks.simul.scoring.simuleval import write_simuleval
from leap.tasks.simul.vocabulary import (
    SENTENCEPIECE,
    Vocabulary,
    load_vocabulary,
    read_vocabulary,
    train_vocabulary,
)
from leap.training import RunFolder
from leap.training.folder import read_results

READERS: Mapping[str, Callable[[Path, str, str], Corpus]] = {
    "text": read_parallel,
    "must-c": read_must_c,
    "covost": read_covost,
    "s2t": read_s2t,
}
"""Of corpora that lie somewhere."""
LONGEST_SILENCE = 10
"""Seconds before and after a sentence."""
FACTS = {
    "corpus": str,
    "source": str,
    "target": str,
    "vocabulary": int,
    "sentences": [int],
    "seconds": [float],
    "left_out": int,
}
"""What is read of metrics.json."""


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Prepare a corpus to translate: text, recordings, or text that is spoken for it.

    Work that was stopped resumes.
    """

    corpus: Literal[
        "numbers", "multi30k", "tatoeba", "asterisk-prompts", "text", "must-c", "covost", "s2t"
    ] = "numbers"
    """numbers needs no file; multi30k (captions), tatoeba (everyday sentences) and
    asterisk-prompts (half an hour of recordings) lie in the folder of data sets; the others where
    --data says: parallel text, MuST-C, CoVoST 2, or fairseq's speech-to-text manifests."""
    data: Path | None = None
    """Folder of the corpus; of text, also one file with a tab between the languages. By default
    the corpus is made, or found among the data sets."""
    source: str = "en"
    """Language that is translated."""
    target: str = "de"
    """Language it is translated into."""
    speak: bool = False
    """Have espeak-ng speak the text, in many voices, with others for the tests."""
    silence: float = 0.0
    """Of text that is spoken: most seconds of silence before and after each sentence, as recordings
    have it; how much is drawn."""
    store: Store = "features"
    """What to keep of speech to train on: frames as float16, or sound that frames are made of when
    they are needed (of a corpus of recordings that is its own files)."""
    vocabulary: int | None = None
    """Subwords, for both languages together; fewer if the text has not as many. By default
    6000, and 130 of numbers, which are then spelt in parts: neun, hundertvier, und, zig."""
    pieces: Literal["bpe", "unigram"] = "bpe"
    """How SentencePiece finds subwords: byte-pair encoding (bpe), or a unigram model."""
    use_vocabulary: Path | None = None
    """Take the subwords of this SentencePiece file, or of this prepared folder, instead; by default
    they are made of the text."""
    limit: int | None = None
    """Sentences to train on, spread over all there are; by default all, and 10,000 of numbers."""
    tests: tuple[str, ...] | None = None
    """Tests to keep, by name; by default all."""
    seed: int = 0
    """Of the numbers, and of how they are spoken."""
    output: Path = Path("runs/simul-data")
    """Folder to write."""

    def __post_init__(self) -> None:
        if self.corpus in READERS and self.data is None:
            raise ConfigError(f"corpus={self.corpus} needs data: the folder it is in")
        if self.corpus not in READERS and self.data is not None:
            raise ConfigError(f"corpus={self.corpus} takes no data; leave it out")
        if self.use_vocabulary is not None:
            refuse_given(
                self,
                ("vocabulary", "pieces"),
                f"of subwords to be made, and use_vocabulary={self.use_vocabulary} has made ones",
            )
        if self.corpus != "numbers" and not self.speak:
            drawn = "of numbers and of what is spoken"
            refuse_given(self, ("seed",), f"{drawn}, and corpus={self.corpus} is read as it is")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit={self.limit} must be 1 or more")
        if not 0 <= self.silence <= LONGEST_SILENCE:
            raise ConfigError(
                f"silence={self.silence} is no number of seconds from 0 to {LONGEST_SILENCE}"
            )
        if self.silence and not self.speak:
            raise ConfigError(f"silence={self.silence} is for text that is spoken: give --speak")
        known = {
            "numbers": ("de",),
            "multi30k": ("de",),
            "tatoeba": tuple(TATOEBA),
            "asterisk-prompts": TARGETS,
        }
        targets = known.get(self.corpus)
        if targets is not None and (self.source != "en" or self.target not in targets):
            raise ConfigError(
                f"corpus={self.corpus} is from en to {' or '.join(targets)}, not {self.source} to "
                f"{self.target}"
            )


@dataclass(frozen=True)
class Prepared:
    """A prepared corpus."""

    folder: Path
    vocabulary: Vocabulary
    extractor: LeapformerFeatureExtractor | None
    """Of speech; None for text."""
    facts: dict[str, Any]
    """What metrics.json says."""

    @property
    def parts(self) -> list[str]:
        """Names of the parts: train, valid, and the tests."""
        return list(self.facts["sentences"])

    def sentences(self, part: str) -> list[Sentence]:
        """Those of one part."""
        if part not in self.parts:
            raise ConfigError(
                f"{self.folder} has no part {part}; there are {', '.join(self.parts)}"
            )
        return read_part(self.folder / f"{part}.tsv")

    def dataset(
        self,
        part: str,
        augment: SpecAugment | None = None,
        target: Literal["translation", "transcript"] = "translation",
    ) -> TextPairs | SpeechPairs:
        """One part, to train on or to measure with.

        Args:
            part: its name.
            augment: put gaps into speech.
            target: what is to be written; of speech, this may be what is said.
        """
        sentences = self.sentences(part)
        if target == "transcript":
            sentences = self._transcribed(sentences, part)
        if self.extractor is None:
            return TextPairs(sentences, self.vocabulary)
        return SpeechPairs(sentences, self.vocabulary, self.extractor, augment)

    def _transcribed(self, sentences: list[Sentence], part: str) -> list[Sentence]:
        """Those of which it is known what is said, with that as their target."""
        if self.extractor is None:
            raise ConfigError(
                f"target=transcript is for speech, and {self.folder} holds text; prepare it with "
                "--speak"
            )
        found = [replace(each, target=each.source) for each in sentences if each.source]
        if not found:
            raise FileError(f"the part {part} of {self.folder} does not tell what is said")
        return found


def prepare(config: PrepareConfig, progress: Progress = silent) -> Prepared:
    """Prepare a corpus as the config says, or go on with it, or, if that has been done, read it."""
    settings = asdict(config)
    settings.pop("output")
    folder = RunFolder(config.output, settings)
    if folder.metrics(FACTS) is None:
        corpus = read_corpus(config)
        if _sound_of(config, corpus) is None and not corpus.is_spoken:
            refuse_given(
                config, ("store",), f"of speech, and {corpus.name} is text that nobody speaks"
            )
        folder.create({"text": _digest(corpus)})
        with folder.alone():
            _prepare(config, corpus, folder, progress)
    return load_prepared(config.output)


def read_corpus(config: PrepareConfig) -> Corpus:
    """The corpus a config names, with the sentences it asks for."""
    if config.corpus == "numbers":
        corpus = numbers_corpus(config.limit or 10_000, seed=config.seed)
    elif config.corpus == "multi30k":
        corpus = read_multi30k()
    elif config.corpus == "tatoeba":
        corpus = read_tatoeba(config.target)
    elif config.corpus == "asterisk-prompts":
        corpus = read_prompts(config.target)
    else:
        assert config.data is not None
        corpus = READERS[config.corpus](config.data, config.source, config.target)
    parts = dict(corpus.parts)
    if not parts.get("train"):
        raise FileError(f"{corpus.name} has the parts {', '.join(parts)}, and none to train on")
    if config.limit is not None:
        train = parts["train"]
        n = min(config.limit, len(train))
        parts["train"] = [train[i * len(train) // n] for i in range(n)]
    for name in config.tests or ():
        if name not in parts:
            raise ConfigError(f"tests: {corpus.name} has no {name}; it has {', '.join(parts)}")
    if config.tests is not None:
        wanted = {"train", "valid", *config.tests}
        parts = {name: sentences for name, sentences in parts.items() if name in wanted}
    return replace(corpus, parts=parts)


def load_prepared(folder: Path) -> Prepared:
    """Read a folder that `prepare` has finished."""
    if not (folder / "metrics.json").is_file() or not (folder / "vocabulary").is_dir():
        raise FileError(f"{folder} is no finished folder of leap simul prepare; run that first")
    facts = read_results(folder / "metrics.json", FACTS)
    extractor = None
    if (folder / "extractor").is_dir():
        extractor = LeapformerFeatureExtractor.from_pretrained(str(folder / "extractor"))
    return Prepared(folder, load_vocabulary(folder / "vocabulary"), extractor, facts)


def _prepare(config: PrepareConfig, corpus: Corpus, folder: RunFolder, progress: Progress) -> None:
    path = folder.path
    extractor = None
    sound_of = _sound_of(config, corpus)
    if sound_of is not None or corpus.is_spoken:
        extractor = LeapformerFeatureExtractor()
        if sound_of is _recording:
            corpus = _store_recordings(corpus, path, extractor, progress)
        elif sound_of is not None:
            corpus = store_speech(corpus, path, sound_of, extractor, config.store, progress)
        else:
            corpus = those_heard(corpus, extractor, progress)
        statistics = estimate(corpus.parts["train"], extractor)
        statistics.save(path / "gcmvn.npz")
        extractor = LeapformerFeatureExtractor(mean=statistics.mean, std=statistics.std)
        folder.write_folder("extractor", extractor.save_pretrained)
    if not (path / "vocabulary").exists():
        folder.write_folder("vocabulary", _vocabulary(config, corpus).save)
    vocabulary = load_vocabulary(path / "vocabulary")
    write_config(
        path,
        f"vocabulary/{SENTENCEPIECE}",
        vocabulary.pieces[len(SPECIAL) :],
        "gcmvn.npz" if extractor else None,
    )
    notes = []
    for part, sentences in corpus.parts.items():
        write_part(path / f"{part}.tsv", sentences)
        if part in ("train", "valid"):
            continue
        if any(sentence.holds_features for sentence in sentences):
            notes.append(
                f"{part} is not there for SimulEval, which plays recordings: it has frames"
            )
        else:
            write_simuleval(path / "simuleval", part, sentences)
    write_whole(path / "left_out.txt", "".join(f"{note}\n" for note in corpus.left_out))
    folder.write_metrics(
        {
            "corpus": corpus.name,
            "source": corpus.source_language,
            "target": corpus.target_language,
            "is_spoken": extractor is not None,
            "vocabulary": len(vocabulary),
            "sentences": {part: len(found) for part, found in corpus.parts.items()},
            "seconds": {
                part: sum(sentence.n_frames or 0 for sentence in found) / 100
                for part, found in corpus.parts.items()
            },
            "left_out": len(corpus.left_out),
            "notes": notes,
        }
    )


def _sound_of(config: PrepareConfig, corpus: Corpus) -> SoundOf | None:
    """What gives the sound that is to be stored; None if there is none, or it lies in files."""
    if config.speak:
        return speaker(corpus.source_language, config.seed, config.silence)
    if config.corpus == "asterisk-prompts":
        return prompts_sound()
    return _recording if corpus.is_spoken and config.store == "features" else None


def _recording(part: str, sentence: Sentence) -> tuple[Samples, str]:
    if sentence.audio is None:
        raise FileError("it has no recording")
    return load_sound(sentence.audio), sentence.speaker


def _store_recordings(
    corpus: Corpus, path: Path, extractor: LeapformerFeatureExtractor, progress: Progress
) -> Corpus:
    """Store frames of recordings to train on; sentences that came as frames stay as they are."""
    framed, recorded = (
        {
            part: [sentence for sentence in sentences if sentence.holds_features == is_framed]
            for part, sentences in corpus.parts.items()
        }
        for is_framed in (True, False)
    )
    if not recorded["train"]:
        return those_heard(corpus, extractor, progress)
    framed_only = those_heard(replace(corpus, parts=framed), extractor, progress)
    stored = store_speech(
        replace(framed_only, parts=recorded), path, _recording, extractor, "features", progress
    )
    parts = {
        part: [*stored.parts.get(part, ()), *framed_only.parts.get(part, ())] for part in framed
    }
    return replace(stored, parts={part: found for part, found in parts.items() if found})


def _vocabulary(config: PrepareConfig, corpus: Corpus) -> Vocabulary:
    given = config.use_vocabulary
    if given is None:
        size = config.vocabulary or (130 if config.corpus == "numbers" else 6000)
        return train_vocabulary(texts(corpus.parts["train"]), size, config.pieces)
    if given.is_dir():
        inside = given / "vocabulary"
        return load_vocabulary(inside if inside.is_dir() else given)
    if not given.is_file():
        raise FileError(f"no vocabulary at {given}")
    return read_vocabulary(given)


def _digest(corpus: Corpus) -> str:
    digest = sha256()
    for part, sentences in corpus.parts.items():
        for sentence in sentences:
            line = "\t".join([part, sentence.id, sentence.source, sentence.target])
            digest.update(f"{line}\n".encode())
    return digest.hexdigest()[:16]
