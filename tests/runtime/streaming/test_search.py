"""Beam search: with room for all hypotheses it finds the best there is."""

from itertools import product

import numpy as np
import pytest
import torch

from leap.models.states import States
from leap.ops.state import State, state
from leap.runtime.streaming.search import Open, search
from leap.runtime.streaming.vocabulary import EOS

PIECES = range(EOS + 1, EOS + 4)
SPACE = PIECES[0]
START = 0


@state
class Past(State):
    """All that was written, as the digits of a number."""

    written: torch.Tensor


@pytest.fixture
def model():
    """Scores that depend on everything before, and how often they were asked for."""
    torch.manual_seed(0)
    size = PIECES[-1] + 1
    weights = torch.randn(997, size, dtype=torch.double) * 2
    asked = []

    def step(last, states, may_end):
        past = (states["past"].written * size + torch.from_numpy(last)) % 997
        scores = weights[past].numpy().copy()
        scores[:, [i for i in range(size) if i != EOS and i not in PIECES]] = -np.inf
        scores[~may_end, EOS] = -np.inf
        asked.append(len(last))
        return scores, States({"past": Past(past)})

    return step, asked


def begin(*numbers):
    return States({"past": Past(torch.tensor(numbers))})


def spells(piece):
    return piece != SPACE


def mean_score(step, sentence, number, pieces):
    """Of a piece, by the model, one after another."""
    total, states, is_said = 0.0, begin(number), sentence.is_said
    for last, piece in zip((sentence.last, *pieces), (*pieces, EOS), strict=True):
        scores, states = step(np.array([last]), states, np.array([is_said]))
        total += float(torch.from_numpy(scores).log_softmax(dim=-1)[0, piece])
        is_said |= spells(piece)
    return total / (len(pieces) + 1)


@pytest.mark.parametrize("is_said", [True, False])
def test_with_room_for_all_it_finds_the_best_of_all(model, is_said):
    step, _ = model
    for number in range(20):
        sentence = Open(START, 3, is_said)
        (found,) = search(step, begin(number), [sentence], 1000, spells)
        every = [p for n in range(4) for p in product(PIECES, repeat=n)]
        best = max(every, key=lambda pieces: mean_score(step, sentence, number, pieces))
        if len(found) < 3:  # Those that fill the room need not end.
            assert tuple(found) == best
            assert is_said or any(map(spells, found))


def test_more_hypotheses_find_better_ones(model):
    step, _ = model
    sentence = Open(START, 12, is_said=True)

    def found(beam):
        ends = [search(step, begin(i), [sentence], beam, spells)[0] for i in range(30)]
        return sum(mean_score(step, sentence, i, end) for i, end in enumerate(ends))

    scores = [found(beam) for beam in (1, 4, 50)]
    assert scores == sorted(scores) and scores[0] < scores[1]


def test_each_sentence_has_what_it_has_alone(model):
    step, asked = model
    sentences = [Open(START, room, is_said=bool(room % 2)) for room in (7, 0, 3, 12)]
    alone = [
        search(step, begin(i), [each], 3, spells)[0] for i, each in enumerate(sentences, start=5)
    ]
    asked.clear()
    assert search(step, begin(5, 6, 7, 8), sentences, 3, spells) == alone
    assert alone[1] == [] and all(len(x) <= s.room for x, s in zip(alone, sentences, strict=True))
    assert max(asked) <= 9 and len(asked) <= 13
    asked.clear()
    assert search(step, begin(5), [Open(START, 0, True)], 3, spells) == [[]] and not asked
