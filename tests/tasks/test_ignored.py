"""No setting is ignored without a word: what a run has no use for is refused, by its flag's name.

Of the settings of attentions this is told by the models themselves: with a setting that is taken a
model is another than without it.
"""

import json
from pathlib import Path

import pytest
import torch

from leap.errors import ConfigError, LeapError
from leap.models import ATTENTIONS, usable_as
from leap.serve.config import OF_LANGUAGE_MODELS, ServeConfig, build
from leap.tasks.lm.compare import CompareConfig
from leap.tasks.lm.evaluate import EvalConfig
from leap.tasks.lm.model import AnyVocabulary, ModelConfig, build_model
from leap.tasks.lm.writing import GenerateConfig
from leap.tasks.lra.prepare import PrepareConfig as ArenaConfig
from leap.tasks.lra.train import TrainConfig as ArenaTrainConfig
from leap.tasks.simul import model as simul
from leap.tasks.simul.evaluate import EvalConfig as SimulEvalConfig
from leap.tasks.simul.live import StreamConfig
from leap.tasks.simul.prepare import PrepareConfig

RUN = Path("runs/a")
SIZES = {"hidden_size": 8, "n_head": 2}
OPTIONS = [
    ("gate", "head"),
    ("convolution", 3),
    ("output_gate", True),
    ("proportion", "travelled"),
    ("proportion", "learned"),
    ("clocks", 2),
    ("constant_steps", True),
    ("proportion_hidden", 5),
    ("proportion_per_head", True),
    ("places", "divided"),
]
SETTINGS = [
    (EvalConfig, {"run": RUN, "stateful": True, "batch": 8}, "batch=8 is of windows"),
    (GenerateConfig, {"run": RUN, "temperature": 0.0, "top_k": 5}, "top_k=5 is of sampling"),
    (GenerateConfig, {"run": RUN, "temperature": 0.0, "top_p": 0.5}, "top_p=0.5 is of"),
    (CompareConfig, {"seeds": (0, 1), "seed": 2}, "seed=2 is in place of seeds=0 1"),
    (ArenaConfig, {"task": ("image",), "seed": 1}, "seed=1 .* image is read as it is"),
    (ArenaTrainConfig, {"attention": ("softmax:travelled",)}, "proportion=travelled is nothing"),
    (ArenaTrainConfig, {"attention": ("leapformer:clocks2",)}, "clocks=2 is of travelled places"),
    (ArenaTrainConfig, {"attention": ("performer:gate",)}, "gate=head is nothing that attention"),
    (PrepareConfig, {"use_vocabulary": RUN, "pieces": "unigram"}, "pieces=unigram .* made"),
    (PrepareConfig, {"use_vocabulary": RUN, "vocabulary": 50}, "vocabulary=50"),
    (PrepareConfig, {"corpus": "multi30k", "seed": 1}, "seed=1 is of numbers"),
    (SimulEvalConfig, {"pauses": "silero"}, "pauses=silero is of resets"),
    (SimulEvalConfig, {"pause": 100}, "pause=100 is of long form"),
    (SimulEvalConfig, {"long_form": "all", "batch": 8}, "batch=8 is of a pool"),
    (SimulEvalConfig, {"engine": "simuleval", "batch": 8}, "batch=8 is of a pool"),
    (StreamConfig, {"segment": 100}, "segment=100 is of sound"),
    (StreamConfig, {"pauses": "loudness"}, "pauses=loudness is of sound"),
]


@pytest.mark.parametrize(("kind", "settings", "told"), SETTINGS)
def test_a_setting_that_the_others_make_useless_is_refused(kind, settings, told):
    with pytest.raises(ConfigError, match=f"^{told}.*leave it|^{told}.*leave one"):
        kind(**settings)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders that are known for a language model and for a translation model by their config."""
    made = {}
    for name, kind in (
        ("writes", "LeapformerForCausalLM"),
        ("translates", "LeapformerForSeq2SeqLM"),
    ):
        made[name] = tmp_path_factory.mktemp("runs") / name
        made[name].mkdir()
        (made[name] / "config.json").write_text(json.dumps({"architectures": [kind]}))
    return made


@pytest.mark.parametrize("name", OF_LANGUAGE_MODELS)
def test_a_server_of_translations_refuses_what_is_of_language_models(name, folders, tmp_path):
    pytest.importorskip("fastapi", reason="the extra serve is not installed")
    value = tmp_path if name == "states" else 3
    with pytest.raises(
        ConfigError, match=f"{name}={value} is of language models, and .*translates"
    ):
        build(ServeConfig(run=folders["translates"], **{name: value}))


def test_a_server_of_a_language_model_refuses_a_policy(folders):
    pytest.importorskip("fastapi", reason="the extra serve is not installed")
    with pytest.raises(ConfigError, match=r"policy=wait-5 is of translation, and .*language model"):
        build(ServeConfig(run=folders["writes"], policy="wait-5"))


def same(one, other, **inputs):
    """Whether two models are one and the same, once they have the same weights."""
    weights, others = one.state_dict(), other.state_dict()
    if {k: v.shape for k, v in weights.items()} != {k: v.shape for k, v in others.items()}:
        return False
    other.load_state_dict(weights)
    with torch.no_grad():
        return torch.equal(one.eval()(**inputs).logits, other.eval()(**inputs).logits)


def moved(model):
    """With weights that all do something."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def has_already(model, attention, name, value):
    fixed = ATTENTIONS[attention].fixed if attention in ATTENTIONS else {}
    if name == "proportion_per_head" and model.config.proportion == "travelled":
        return value  # Steps are per head by default.
    return getattr(model.config, name) == value or fixed.get(name) == value


@pytest.mark.parametrize("attention", [*usable_as("causal"), "leap,leapformer"])
def test_a_language_model_has_what_it_was_told_or_refuses(attention):
    ids, vocabulary = torch.randint(20, (1, 6)), AnyVocabulary(vocab_size=20)
    sizes = {"attention": attention, **SIZES, "n_layer": attention.count(",") + 1}
    plain = moved(build_model(ModelConfig(**sizes), vocabulary, 8))
    taken = set()
    for name, value in OPTIONS:
        try:
            other = build_model(ModelConfig(**sizes, **{name: value}), vocabulary, 8)
        except LeapError as error:
            assert str(error).startswith(f"{name}={value}")
            continue
        taken.add(name)
        if not has_already(plain, attention, name, value):
            assert not same(plain, other, input_ids=ids), (name, value)
    known = [ATTENTIONS[each] for each in attention.split(",")]
    assert taken <= {name for each in known for name in (*each.options, *each.fixed)} - {"places"}


@pytest.mark.parametrize("attention", ["leapformer", "cosformer", "elu-linear", "softmax"])
def test_a_translation_model_has_what_it_was_told_or_refuses(attention):
    ids = torch.randint(20, (1, 6))
    sizes = {**SIZES, "feed_forward_size": 8, "n_layer": 1, "encoder_layers": 1}
    sizes |= {"attention": attention}
    plain = moved(simul.build_model(simul.ModelConfig(**sizes), range(20)))
    told = {}
    for name, value in [*OPTIONS, ("feature", "exp"), ("cross_window", 2)]:
        try:
            other = simul.build_model(simul.ModelConfig(**sizes, **{name: value}), range(20))
        except LeapError as error:
            told[name] = str(error)
            assert str(error).startswith(f"{name}={value}")
            continue
        if not has_already(plain, attention, name, value):
            inputs = {"input_ids": ids, "decoder_input_ids": ids}
            assert not same(plain, other, **inputs), (name, value)
    assert ("cross_window" in told) == (attention != "softmax")
    assert ("feature" in told) == (attention in ("softmax", "elu-linear"))
    assert ("proportion" in told) == (attention != "leapformer")


def test_places_are_divided_in_encoders_that_travel():
    sizes = {**SIZES, "feed_forward_size": 8, "n_layer": 1, "encoder_layers": 1}
    sizes |= {"proportion": "travelled", "places": "divided"}
    assert simul.build_model(simul.ModelConfig(**sizes), range(20)).config.places == "divided"
    with pytest.raises(ConfigError, match="places=divided needs the last place"):
        simul.build_model(simul.ModelConfig(**sizes, position_embedding="alibi"), range(20))
    assert ArenaTrainConfig(attention=("leapformer:divided",)).variants()
