"""From a prepared corpus to a run folder."""

import json
import math
import shutil
from dataclasses import replace
from random import Random

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from leap.errors import ConfigError, FileError
from leap.tasks.simul import prepare as preparing
from leap.tasks.simul.corpora.corpus import Corpus, Sentence
from leap.tasks.simul.corpora.parallel import write_parallel
from leap.tasks.simul.corpora.s2t import read_part, write_part
from leap.tasks.simul.data import TokenBatches
from leap.tasks.simul.evaluate import EvalConfig, evaluate
from leap.tasks.simul.model import build_model, load_run, take_decoder, take_encoder
from leap.tasks.simul.prepare import PrepareConfig, load_prepared, prepare
from leap.tasks.simul.streaming.stream import load_trained
from leap.tasks.simul.train import TrainConfig, train

SMALL = {
    "hidden_size": 16,
    "feed_forward_size": 16,
    "n_layer": 1,
    "encoder_layers": 1,
    "n_head": 2,
    "tokens": 256,
    "steps": 6,
    "evaluate_every": 3,
    "log_every": 1,
    "average": 2,
}


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "numbers"
    prepare(PrepareConfig(limit=60, vocabulary=120, output=folder))
    return folder


DIGITS = {"one": "eins", "two": "zwei", "three": "drei", "four": "vier", "five": "fuenf"}


@pytest.fixture(scope="module")
def spoken(tmp_path_factory, tones):
    """Digits, two or three in a row, each of them a chord of its own."""
    chance = Random(0)
    parts = {
        part: [
            Sentence(" ".join(words), " ".join(DIGITS[word] for word in words))
            for words in (chance.choices(list(DIGITS), k=chance.randint(2, 3)) for _ in range(n))
        ]
        for part, n in {"train": 80, "valid": 10, "test": 10}.items()
    }
    folder = tmp_path_factory.mktemp("data")
    write_parallel(Corpus("digits", "en", "de", parts), folder / "text")
    settings = {"corpus": "text", "data": folder / "text", "vocabulary": 40}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "speaker", lambda *_: tones)
        prepare(PrepareConfig(**settings, speak=True, output=folder / "spoken"))
    return folder / "spoken"


OF_SPEECH = {"tokens": 800, "subsampling": 2, "augment": None, "learning_rate": 0.01}


@pytest.fixture(scope="module")
def recogniser(spoken, tmp_path_factory):
    """A run on the transcripts."""
    folder = tmp_path_factory.mktemp("runs") / "recogniser"
    settings = SMALL | OF_SPEECH | {"target": "transcript"}
    train(TrainConfig(**settings, data=spoken, output=folder))
    return folder


@pytest.fixture(scope="module")
def trained(numbers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "numbers"
    train(TrainConfig(**SMALL, data=numbers, output=folder))
    return folder


def test_a_run_leaves_a_model_that_can_be_read(trained):
    metrics = json.loads((trained / "metrics.json").read_text())
    assert metrics["steps"] == 6
    model, vocabulary = load_run(trained)
    assert len(vocabulary) == model.config.vocab_size == metrics["pieces"]
    assert not model.training
    same = AutoModelForSeq2SeqLM.from_pretrained(trained / "model")
    tokens = AutoTokenizer.from_pretrained(trained / "model")("seven", return_tensors="pt")
    written = model.generate(**tokens, max_new_tokens=5)
    assert torch.equal(written, same.generate(**tokens, max_new_tokens=5))
    assert (trained / "curve.png").stat().st_size > 1000


def test_a_run_knows_the_language_of_its_source(trained):
    found = load_trained(trained)
    assert found.model.config.source_language == "en"
    found.model.config.source_language = "de"
    assert found.interpreter("wait-3").row().source.language == "de"


def test_a_run_that_was_stopped_goes_on_to_the_same_end(numbers, trained, tmp_path):
    class Stop(Exception):
        pass

    def stop(status):
        if status.step == 5:
            raise Stop

    config = TrainConfig(**SMALL, data=numbers, output=tmp_path / "run")
    with pytest.raises(Stop):
        train(config, stop)
    metrics = train(config)
    whole = json.loads((trained / "metrics.json").read_text())
    losses, expected = (
        [row["loss"] for row in found["history"] if "loss" in row] for found in (metrics, whole)
    )
    assert losses == expected
    assert metrics["best_loss"] == whole["best_loss"]


def test_a_run_goes_on_to_more_steps(numbers, tmp_path):
    config = TrainConfig(data=numbers, output=tmp_path, schedule="constant", **SMALL)
    train(config)
    told = []
    longer = train(replace(config, steps=9, device="cpu"), told.append)
    assert [status.step for status in told if status.note is None][:1] == [7]
    assert longer["steps"] == 9 and longer == json.loads((tmp_path / "metrics.json").read_text())


def test_epochs_are_passes_over_the_batches(numbers, tmp_path):
    settings = SMALL | {"steps": None, "epochs": 1.0, "evaluate_every": 100}
    metrics = train(TrainConfig(**settings, data=numbers, output=tmp_path / "run"))
    seen = sum(1 for row in metrics["history"] if "loss" in row)
    batches = TokenBatches(load_prepared(numbers).dataset("train"), SMALL["tokens"])
    assert metrics["steps"] == seen == batches.per_pass > 2


def test_each_attention_can_be_another(numbers, tmp_path):
    parts = {"encoder_attention": "softmax", "decoder_attention": "leap"}
    settings = SMALL | {
        "steps": 3,
        "n_layer": 2,
        "cross_attention": "softmax,linear",
        "cross_window": 5,
        "feature": "exp",
    }
    train(TrainConfig(**settings, **parts, data=numbers, output=tmp_path / "run"))
    config = load_run(tmp_path / "run")[0].config
    assert config.encoder_attention == "softmax"
    assert config.cross_attention == ["softmax", "linear"]
    assert config.cross_window == 5
    assert config.feature == "exp"
    settings = SMALL | {"cross_attention": "leapformer,elu-linear", "output": tmp_path / "other"}
    with pytest.raises(ConfigError, match="2 names for 1 layers"):
        train(TrainConfig(**settings, data=numbers))


def test_what_cannot_be_read_is_an_error_that_says_so(trained, tmp_path):
    with pytest.raises(FileError, match="leap simul prepare"):
        train(TrainConfig(**SMALL, data=tmp_path, output=tmp_path / "run"))
    with pytest.raises(FileError, match="leap simul train"):
        load_run(tmp_path)
    (tmp_path / "data.json").write_text('{"sentences": ""}')
    (tmp_path / "config.json").write_text("{}")  # the run's settings, not a model's
    with pytest.raises(FileError, match="is not finished; give its leap simul train again"):
        load_run(tmp_path)
    with pytest.raises(ConfigError, match="tokens=0"):
        TrainConfig(tokens=0)


def test_speech_can_be_learnt_and_streamed(spoken, tmp_path):
    settings = {"hidden_size": 32, "feed_forward_size": 64, "steps": 150, "evaluate_every": 50}
    settings |= {"dropout": 0.0, "label_smoothing": 0.0}
    config = TrainConfig(**SMALL | OF_SPEECH | settings, data=spoken, output=tmp_path / "run")
    metrics = train(config)
    first = next(row["loss"] for row in metrics["history"] if "loss" in row)
    assert metrics["best_loss"] < 0.2 * first
    found = evaluate(
        EvalConfig(
            run=tmp_path / "run", data=spoken, waits=(3, "offline"), output=tmp_path / "scores"
        )
    )
    assert [each.scores.empty for each in found] == [0, 0]
    assert min(each.scores.chrf for each in found) > 60  # Of untrained models it is below 20.


def test_speech_whose_words_are_not_known_learns_its_translation_alone(spoken, tmp_path):
    shutil.copytree(spoken, tmp_path / "data")
    for part in ("train", "valid"):
        table = tmp_path / "data" / f"{part}.tsv"
        write_part(table, [replace(sentence, source="") for sentence in read_part(table)])
    config = TrainConfig(
        **SMALL | OF_SPEECH, data=tmp_path / "data", ctc_weight=1.0, output=tmp_path / "run"
    )
    losses = [row["loss"] for row in train(config)["history"] if "loss" in row]
    pieces = len(load_prepared(tmp_path / "data").vocabulary)
    assert max(losses) < 1.5 * math.log(pieces)


def test_a_recogniser_writes_what_is_said(spoken, recogniser):
    prepared = load_prepared(spoken)
    told, translated = (
        prepared.dataset("test", target=target)[0] for target in ("transcript", "translation")
    )
    sentence = prepared.sentences("test")[0]
    assert prepared.vocabulary.decode(told["labels"].tolist()) == sentence.source
    assert prepared.vocabulary.decode(translated["labels"].tolist()) == sentence.target
    assert torch.equal(told["labels"][:-1], told["transcript"])
    assert load_run(recogniser)[0].ctc_head is not None


def test_translation_begins_with_the_encoder_of_a_recogniser(spoken, recogniser, tmp_path):
    settings = SMALL | OF_SPEECH | {"learning_rate": 1e-9, "steps": 3, "average": 1}
    config = TrainConfig(**settings, data=spoken, encoder_from=recogniser, output=tmp_path / "run")
    train(config)
    old, new = load_run(recogniser)[0], load_run(tmp_path / "run")[0]
    for name, value in old.model.encoder.state_dict().items():
        torch.testing.assert_close(new.model.encoder.state_dict()[name], value)
    torch.testing.assert_close(new.ctc_head.weight, old.ctc_head.weight)
    assert not torch.allclose(new.lm_head.weight, old.lm_head.weight, atol=1e-2)


def test_an_encoder_that_does_not_fit_is_refused(spoken, numbers, recogniser, trained):
    speech, text = load_prepared(spoken).vocabulary, load_prepared(numbers).vocabulary
    config = TrainConfig(**SMALL | OF_SPEECH)
    for change, message in (
        ({"hidden_size": 32}, "has hidden_size=16, and this model 32; train both with the same"),
        ({"encoder_layers": 2}, "has encoder_layers=1, and this model 2"),
        ({"subsampling": 3}, "has n_subsampling=2, and this model 3"),
        ({"encoder_attention": "softmax"}, "has encoder_attention=leapformer, and this model soft"),
    ):
        model = build_model(replace(config, **change), speech, 80)
        with pytest.raises(ConfigError, match=message):
            take_encoder(model, speech, recogniser)
    with pytest.raises(ConfigError, match="reads speech, and this model text"):
        take_encoder(build_model(config, text), text, recogniser)
    with pytest.raises(ConfigError, match="knows other subwords"):
        take_encoder(build_model(config, speech), speech, trained)
    with pytest.raises(FileError, match="no finished run at"):
        take_encoder(build_model(config, speech, 80), speech, spoken.parent)


def test_speech_begins_with_the_decoder_of_a_run_of_text(spoken, tmp_path):
    text = PrepareConfig(
        corpus="text", data=spoken.parent / "text", use_vocabulary=spoken, output=tmp_path / "text"
    )
    prepare(text)
    train(TrainConfig(**SMALL, data=tmp_path / "text", output=tmp_path / "first"))
    settings = SMALL | OF_SPEECH | {"learning_rate": 1e-9, "steps": 3, "average": 1}
    then = {"decoder_from": tmp_path / "first", "output": tmp_path / "then"}
    train(TrainConfig(**settings, data=spoken, **then))
    old, new = (load_run(tmp_path / name)[0] for name in ("first", "then"))
    for name, value in old.model.decoder.state_dict().items():
        torch.testing.assert_close(new.model.decoder.state_dict()[name], value)
    torch.testing.assert_close(new.lm_head.weight, old.lm_head.weight)


def test_a_decoder_that_does_not_fit_is_refused(spoken, numbers, recogniser, trained):
    speech, text = load_prepared(spoken).vocabulary, load_prepared(numbers).vocabulary
    config = TrainConfig(**SMALL | OF_SPEECH)
    for change, message in (
        ({"hidden_size": 32}, "decoder_from=.* has hidden_size=16, and this model 32"),
        ({"n_layer": 2}, "has n_layer=1, and this model 2"),
        ({"cross_attention": "softmax"}, "has cross_attention=leapformer, and this model softmax"),
    ):
        with pytest.raises(ConfigError, match=message):
            take_decoder(build_model(replace(config, **change), speech, 80), speech, recogniser)
    with pytest.raises(ConfigError, match=r"decoder_from=.* knows other subwords"):
        take_decoder(build_model(config, text), text, recogniser)
    with pytest.raises(ConfigError, match=r"decoder_from=.* knows other subwords"):
        take_decoder(build_model(config, speech, 80), speech, trained)


def test_text_has_no_transcript_to_write(numbers, tmp_path):
    config = TrainConfig(**SMALL, data=numbers, target="transcript", output=tmp_path / "run")
    with pytest.raises(ConfigError, match="target=transcript is for speech"):
        train(config)


@pytest.mark.parametrize(
    "settings",
    [
        {"n_head": 3},
        {"n_layer": 0},
        {"encoder_layers": 0},
        {"feed_forward_size": 0},
        {"dropout": 1.0},
    ],
    ids=str,
)
def test_settings_that_make_no_model_are_refused_before_data_is_read(tmp_path, settings):
    with pytest.raises(ConfigError, match=f"{next(iter(settings))}|n_head=3|intermediate|dropout"):
        train(TrainConfig(data=tmp_path / "missing", output=tmp_path / "run", **settings))
