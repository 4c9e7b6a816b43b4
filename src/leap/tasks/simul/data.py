"""Batches to train on: sentence pairs, put together by length and padded.

    dataset = TextPairs(sentences, vocabulary)
    batches = TokenBatches(dataset, tokens=4096, n_batches=1000, seed=0)
    collate(batches[0])     # input_ids, attention_mask, labels

Items, before and after they are put together (b sentences of a batch):

    text    input_ids       [source]        ends with eos; padded with pad
    speech  input_features  [frames, bins]  normalised; padded with 0
            transcript      [subwords]      what is said, without eos, or nothing where that is not
                                            known; padded with -100
    both    labels          [target]        ends with eos; padded with -100
            attention_mask  [source] or [frames], made when padding: 1 where there is something
"""

import random
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from leap.errors import ConfigError, InputError
from leap.models.fbank import LeapformerFeatureExtractor
from leap.runtime.streaming.vocabulary import EOS, PAD
from leap.tasks.simul.audio.features import SpecAugment, load_frames
from leap.tasks.simul.audio.files import Audio
from leap.tasks.simul.corpora.corpus import Sentence
from leap.tasks.simul.paths import Paths, wait_schedule
from leap.tasks.simul.vocabulary import Vocabulary

IGNORED = -100
"""The label that no loss looks at."""

SAME_SIZE = 16
"""Frames up to a multiple of which recordings count as equally long, so that batches can differ
between passes."""

Item = dict[str, Tensor]


@runtime_checkable
class Pairs(Protocol):
    """What batches are made of: items, and how long each one is."""

    @property
    def sizes(self) -> Sequence[int]:
        """Subwords of the longer side, or frames, of each."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Item: ...


class TextPairs(Dataset[Item]):
    """Sentences and their translations as subwords: `input_ids` and `labels`.

    Args:
        sentences: any; their sound is not looked at.
        vocabulary: of both languages.
    """

    def __init__(self, sentences: Sequence[Sentence], vocabulary: Vocabulary) -> None:
        self.sources = _encode([sentence.source for sentence in sentences], vocabulary)
        self.targets = _encode([sentence.target for sentence in sentences], vocabulary)
        self.sizes = [
            max(len(source), len(target))
            for source, target in zip(self.sources, self.targets, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Item:
        return {"input_ids": self.sources[index], "labels": self.targets[index]}


class SpeechPairs(Dataset[Item]):
    """Recordings and their translations: `input_features`, `transcript` and `labels`.

    Frames are read, or made of the sound, when an item is taken.

    Args:
        sentences: with their sound.
        vocabulary: of both languages; what is said is told in its subwords too.
        extractor: makes the frames, and knows how to normalise them.
        augment: put gaps into the frames, to train on.
    """

    def __init__(
        self,
        sentences: Sequence[Sentence],
        vocabulary: Vocabulary,
        extractor: LeapformerFeatureExtractor,
        augment: SpecAugment | None = None,
    ) -> None:
        self.audio: list[Audio] = []
        self.sizes: list[int] = []
        for sentence in sentences:
            if sentence.audio is None or sentence.n_frames is None:
                raise InputError(f"sentence {sentence.id} is not spoken; prepare it with speech")
            self.audio.append(sentence.audio)
            self.sizes.append(-(-sentence.n_frames // SAME_SIZE) * SAME_SIZE)
        self.targets = _encode([sentence.target for sentence in sentences], vocabulary)
        spoken = vocabulary.encode_all([sentence.source for sentence in sentences])
        self.transcripts = [torch.tensor(pieces, dtype=torch.long) for pieces in spoken]
        self.extractor = extractor
        self.augment = augment

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Item:
        frames = self.extractor.normalise(load_frames(self.audio[index], self.extractor))
        features = torch.from_numpy(frames)
        if self.augment is not None:
            features = self.augment(features)
        return {
            "input_features": features,
            "transcript": self.transcripts[index],
            "labels": self.targets[index],
        }


class TokenBatches(Dataset[list[Item]]):
    """Whole batches of sentences of like length, for pass after pass over the data.

    Each sentence is in one batch of each pass. Which others it meets there, and when, is drawn anew
    for each pass, but how many batches a pass has is always the same.

    Trainer can group by length too (`train_sampling_strategy`), but its batches have a fixed number
    of sentences, and so of any number of tokens; these fill a number of tokens.

    Args:
        data: the sentences.
        tokens: largest size of a batch, padding included: subwords of text, or frames of speech. A
            sentence longer than that is a batch of its own.
        n_batches: how many the run takes; by default one pass.
        seed: of what is drawn; None for one order by length.
    """

    def __init__(
        self, data: Pairs, tokens: int, n_batches: int | None = None, seed: int | None = 0
    ) -> None:
        if tokens < 1:
            raise ConfigError(f"tokens={tokens} must be 1 or more")
        if not len(data):
            raise ConfigError("there are no sentences to make batches of")
        self.data = data
        self.seed = seed
        self.sizes = torch.tensor(data.sizes)
        self.cuts = _cut(sorted(data.sizes), tokens)
        self.n_batches = len(self.cuts) if n_batches is None else n_batches
        self._order: tuple[int, list[list[int]]] = (-1, [])

    @property
    def per_pass(self) -> int:
        """Batches in one pass over the data."""
        return len(self.cuts)

    def __len__(self) -> int:
        return self.n_batches

    def __getitem__(self, index: int) -> list[Item]:
        return [self.data[place] for place in self.places(index)]

    def places(self, index: int) -> list[int]:
        """Which sentences are in a batch."""
        n_pass, place = divmod(index, self.per_pass)
        if self._order[0] != n_pass:
            self._order = n_pass, self._draw(n_pass)
        return self._order[1][place]

    def _draw(self, n_pass: int) -> list[list[int]]:
        if self.seed is None:
            order = self.sizes.argsort(stable=True).tolist()
            return [order[start:end] for start, end in self.cuts]
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + n_pass)
        mixed = torch.randperm(len(self.sizes), generator=generator)
        # A stable sort: sentences of one size stay mixed, and the cuts still fit.
        order = mixed[self.sizes[mixed].argsort(stable=True)].tolist()
        shuffled = torch.randperm(self.per_pass, generator=generator).tolist()
        return [order[start:end] for start, end in (self.cuts[i] for i in shuffled)]


def collate(items: Sequence[Item] | Sequence[Sequence[Item]]) -> Item:
    """Pad sentences to one length, and mark what is padding.

    Args:
        items: of `TextPairs` or `SpeechPairs`; or whole batches of them, which become one.
    """
    flat: list[Item] = []
    for item in items:
        flat.extend([item] if isinstance(item, dict) else item)
    batch = {}
    for name in flat[0]:
        sequences = [item[name] for item in flat]
        value = {"input_ids": PAD, "input_features": 0.0}.get(name, IGNORED)
        batch[name] = pad_sequence(sequences, batch_first=True, padding_value=value)
        if name.startswith("input_"):
            lengths = torch.tensor([len(sequence) for sequence in sequences])
            steps = torch.arange(batch[name].shape[1])
            batch["attention_mask"] = (steps < lengths[:, None]).long()
    return batch


class Drawn(Dataset[tuple[int, list[Item]]]):
    """Batches with their number, by which `Collate` draws."""

    def __init__(self, batches: TokenBatches) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> tuple[int, list[Item]]:
        return index, self.batches[index]


class Collate:
    """Makes of numbered batches what a model's forward takes, its path drawn by the number.

    Args:
        paths: what to draw from.
        is_speech: whether that is what is read.
        seed: of what is drawn.
        with_transcript: keep what is said, for models that learn to tell it.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        is_speech: bool = False,
        seed: int = 0,
        with_transcript: bool = False,
    ) -> None:
        self.paths = paths.resolved(is_speech=is_speech)
        self.seed = seed
        self.with_transcript = with_transcript

    def __call__(self, numbered: Sequence[tuple[int, list[Item]]]) -> dict[str, Any]:
        """One batch of one or more."""
        number = numbered[0][0]
        batch: dict[str, Any] = dict(collate([items for _, items in numbered]))
        if not self.with_transcript:
            batch.pop("transcript", None)
        chance = random.Random(f"{self.seed} {number}")
        wait, size = chance.choice(self.paths.waits), chance.choice(self.paths.chunk_sizes)
        schedule = wait_schedule(batch["labels"].shape[1], wait, self.paths.ratio, size)
        if schedule is not None:
            batch["visible"] = schedule
        return batch | {"chunk_size": size}


def _cut(sizes: Sequence[int], tokens: int) -> list[tuple[int, int]]:
    """Where each batch begins and ends among sentences in order of their size."""
    cuts, start = [], 0
    for end, size in enumerate(sizes):
        if end > start and size * (end + 1 - start) > tokens:
            cuts.append((start, end))
            start = end
    return [*cuts, (start, len(sizes))]


def _encode(texts: Sequence[str], vocabulary: Vocabulary) -> list[Tensor]:
    return [torch.tensor([*pieces, EOS]) for pieces in vocabulary.encode_all(texts)]
