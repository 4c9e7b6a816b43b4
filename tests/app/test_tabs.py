"""What the tabs compute, against plain forms of it."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("gradio", reason="the extra app is not installed")

from leap.app.explain import predict, strike
from leap.app.interpret import translate
from leap.app.models import open_model
from leap.app.strike import words
from leap.app.write import carried, write
from leap.errors import InputError
from leap.explain.importance import log_probabilities
from leap.runtime.streaming.vocabulary import EOS
from leap.serve.sampling import Sampling

GREEDY = Sampling(temperature=0.0)
SOURCE = "three hundred and nine seven"


@pytest.fixture(scope="module")
def writer(lm_run):
    return open_model(lm_run, "writer")


def test_writing_is_that_of_the_model_and_its_state_keeps_its_size(writer):
    *_, text = write(writer, "one two", 12, GREEDY)
    ids = torch.tensor([[256, *b"one two"]])
    expected = writer.run.model.generate(ids, max_new_tokens=12, do_sample=False)[0, 1:].tolist()
    assert list(text.tokens) == expected
    assert text.n_given == 7 and text.n_written == 12 and text.rate > 0
    sizes = {each.n_bytes for each in write(writer, "one two", 4, GREEDY)}
    assert sizes == {text.n_bytes}


def test_what_carries_a_token_without_gradients_is_what_striking_out_costs(exported, writer):
    given = open_model(exported, "exported")
    tokens = list(b"one two three")
    found = carried(given, tokens, 9)
    ids = torch.tensor([[256, *tokens[:9]]])
    with torch.no_grad():
        whole = log_probabilities(writer.run.model, input_ids=ids)[0, tokens[9]]
        for i in (0, 4, 8):
            kept = ids[:, [j for j in range(10) if j != i + 1]]
            less = log_probabilities(writer.run.model, input_ids=kept)[0, tokens[9]]
            assert found[i] == pytest.approx(float(whole - less), abs=1e-4)
    assert len(carried(writer, tokens, 9)) == 9


def test_a_word_is_struck_out_as_if_it_had_never_been_there(writer):
    before = predict(writer, "one two three")
    assert len(before.rows) == 4 and before.row_names[0] == "layer 0 · head 0"
    after = strike(writer, before, 6)  # In "two".
    assert sorted(after.struck) == [4, 5, 6, 7]
    kept = torch.tensor([[256, *b"one three"]])
    with torch.no_grad():
        chances = log_probabilities(writer.run.model, input_ids=kept)[0].exp()
    for i, p in after.after.items():
        assert p == pytest.approx(float(chances[i]), abs=1e-5)
    assert strike(writer, after, 5).struck == before.struck
    with pytest.raises(InputError, match="where every text begins"):
        strike(writer, before, 0)


def test_an_exported_model_tells_what_each_word_counts_and_no_layers(exported):
    model = open_model(exported, "exported")
    found = predict(model, "one two three")
    assert not found.rows and len(found.weights) == 1 + len("one two three")
    after = strike(model, found, 6)
    fall = math.log(found.before[found.target] / after.after[found.target])
    assert sum(found.weights[i] for i in after.struck) == pytest.approx(fall, abs=1e-5)


def test_a_classifier_may_lose_all_words_but_one(classifier):
    model = open_model(classifier, "reviewer")
    found = predict(model, "good film")
    assert set(found.names.values()) == {"class 0", "class 1"}
    after = strike(model, found, 0)
    assert after.after and sum(after.after.values()) == pytest.approx(1)
    with pytest.raises(InputError, match="there must be a word left"):
        strike(model, after, 5)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["The", " sh", "ip", "\n", "x"], [[0], [1, 2], [3, 4]]),
        (["", "a", "b"], [[0, 1, 2]]),
        (list("ab c"), [[0, 1], [2, 3]]),
        ([], []),
    ],
)
def test_pieces_belong_to_words(pieces, expected):
    assert words(pieces) == expected


def test_what_a_word_took_is_what_striking_each_source_word_costs(translator):
    """Against a plain form: the source without the word, all read, one piece after another."""
    interpreter = open_model(translator, "x").interpreter("offline")
    *_, found = translate(interpreter, SOURCE)
    assert found.source == tuple(SOURCE.split()) and found.words
    assert found.took.shape == (len(found.words), 5) and found.lagging is not None
    vocabulary, model = interpreter.vocabulary, interpreter.model
    (*_, recorded) = _pieces(interpreter)

    def score(kept):
        states, last, total = None, interpreter.start, 0.0
        for piece in (*vocabulary.encode(" ".join(kept)), EOS):
            states = model.read(torch.tensor([[piece]]), states)
        for piece in recorded:
            logits, states = model.write(torch.tensor([[last]]), states)
            total += float(logits[0, -1].log_softmax(-1)[piece])
            last = piece
        return total

    with torch.no_grad():
        every = SOURCE.split()
        for i in range(5):
            fall = score(every) - score(every[:i] + every[i + 1 :])
            assert found.took[:, i].sum() == pytest.approx(fall, abs=1e-4)


def _pieces(interpreter):
    from leap.runtime.streaming.took import Recording

    recording = Recording.of(interpreter)
    stream = recording.stream(interpreter)
    stream.push(SOURCE)
    said = stream.finish()
    assert said == recording.sentences[0].words
    return said, recording.sentences[0].pieces


def test_a_word_takes_nothing_of_what_came_after_it(translator):
    interpreter = open_model(translator, "x").interpreter("wait-1")
    *_, found = translate(interpreter, SOURCE)
    assert found.took[0, 0] > 1
    assert np.abs(found.took[0, 2:]).max() < 1e-4  # The rounding of sums.


def test_translation_as_typed_is_the_beginning_of_the_whole(translator):
    interpreter = open_model(translator, "x").interpreter("wait-1")
    *_, whole = translate(interpreter, f"{SOURCE} one thousand seven seven.")
    *_, typed = translate(interpreter, f"{SOURCE} one thousand seven sev", ended=False)
    assert typed.words and whole.words[: len(typed.words)] == typed.words
    assert typed.lags == whole.lags[: len(typed.words)] and typed.took is None


def test_sound_is_struck_out_in_stretches(speech_translator):
    interpreter = open_model(speech_translator, "x").interpreter("wait-3")
    sound = np.random.default_rng(0).standard_normal(16000).astype(np.float32) / 20
    *_, found = translate(interpreter, sound)
    assert found.source[0].startswith("0.0 to ") and found.took.shape == (
        len(found.words), len(found.source)
    )  # fmt: skip
    assert found.words and found.took.any()
