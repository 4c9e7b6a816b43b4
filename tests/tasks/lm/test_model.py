import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    BloomForCausalLM,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
)

from leap.errors import ConfigError, FileError, LeapError
from leap.models import LeapForCausalLM, LeapformerForCausalLM
from leap.models.presets import PRESETS
from leap.tasks.lm.generate import write_on
from leap.tasks.lm.model import ModelConfig, build_model, load_model, max_length, preset_sizes
from leap.tasks.lm.tokenizer import TextTokenizer, byte_tokenizer, train_tokenizer
from leap.tasks.lm.train import run_folder
from leap.tasks.lm.writing import GenerateConfig


def build(length=16, **settings):
    settings = {"hidden_size": 16, "n_layer": 2, "n_head": 2} | settings
    return build_model(ModelConfig(**settings), byte_tokenizer(), length)


@pytest.fixture
def copied(trained, tmp_path):
    """A run folder to break."""
    return shutil.copytree(trained, tmp_path / "copy")


@pytest.mark.parametrize(
    ("attention", "kind"),
    [
        ("leapformer", LeapformerForCausalLM),
        ("cosformer", LeapformerForCausalLM),
        ("linear", LeapformerForCausalLM),
        ("softmax", LeapformerForCausalLM),
        ("leap", LeapForCausalLM),
        ("gated-delta", LeapformerForCausalLM),
        ("gated-delta,softmax", LeapformerForCausalLM),
        ("leap,leapformer", LeapformerForCausalLM),
        ("gpt2", GPT2LMHeadModel),
    ],
)
def test_every_attention_makes_a_model_that_learns(attention, kind):
    model = build(attention=attention)
    assert type(model) is kind
    tokens = torch.arange(16).unsqueeze(0)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_tokenizer_sets_the_vocabulary_and_the_end():
    config = build().config
    assert (config.vocab_size, config.eos_token_id, config.n_positions) == (257, 256, 16)


def test_attentions_take_turns():
    config = build(attention="leap,leapformer", n_layer=3).config
    assert config.attentions == ["leap", "leapformer", "leap"]


def test_positions_are_what_the_attention_can_use():
    expected = {"leapformer": "none", "gated-delta": "none", "gated-delta,leapformer": "alibi"}
    for attention, positions in expected.items():
        assert build(attention=attention).config.position_embedding == positions
    assert build(preset="350m", attention="gated-delta").config.position_embedding == "none"
    with pytest.raises(
        ConfigError, match=r"'alibi' needs scores that fade.*'gated-delta' has none"
    ):
        build(attention="gated-delta", position_embedding="alibi")


def test_windows_double_or_are_as_given():
    assert build(attention="leap", n_layer=3).config.windows == [4, 8, None]
    beyond = build(attention="leap", n_layer=5).config  # 16 tokens are all that it is shown.
    assert beyond.windows == [4, 8, None, None, None]
    assert build(attention="leap", windows="global").config.windows == [None, None]
    assert build(attention="leap", windows="3,global").config.windows == [3, None]


@pytest.mark.parametrize("attention", ["leapformer", "softmax"])
def test_gates_and_convolutions_are_passed_on(attention):
    config = build(attention=attention, gate="head", convolution=4).config
    assert (config.gate, config.convolution) == ("head", 4)
    assert build(proportion="learned").config.gate is None


def test_formulation_is_passed_on():
    assert build(attention="leap", formulation="leap-elu").config.formulation == "leap-elu"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"attention": "leapfromer"},
            "attention='leapfromer' is not known; there are leapformer, ",
        ),
        ({"attention": "leap", "windows": "4,8,16"}, "has 3 entries for 2 layers"),
        ({"attention": "leap", "windows": "wide"}, "windows='wide' is not known; give doubling"),
        ({"windows": "global"}, "are of LEAP layers, and attention=leapformer has none"),
        ({"attention": "gpt2", "formulation": "leap-elu"}, "are of LEAP layers, and gpt2 has none"),
        ({"attention": "gpt2", "position_embedding": "rotary"}, "gpt2 has learned positions"),
        (
            {"attention": "gpt2", "convolution": 4},
            "gpt2 has no convolution=4; use attention=softmax",
        ),
        ({"attention": "leap", "gate": "head"}, "LEAP layers have no gates"),
        ({"attention": "softmax", "gate": "channel"}, "use gate='head'"),
        ({"convolution": 1}, "convolution=1 would meet no other token"),
        ({"attention": "leap", "formulation": "leap-2"}, "formulation='leap-2' is not known"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        build(**settings)


def test_presets_give_sizes_that_can_be_overruled():
    model = build(preset="tiny", hidden_size=None, n_layer=None, n_head=4)
    assert (model.config.hidden_size, model.config.n_layer, model.config.n_head) == (32, 2, 4)
    assert model.config.vocab_size == 257
    assert build(preset="tiny", n_layer=3, attention="leap").config.windows == [4, 8, None]
    assert build(preset="tiny", attention="gpt2", hidden_size=None).config.n_embd == 32
    with pytest.raises(ConfigError, match="no preset is called 'teeny'; there are tiny, small"):
        build(preset="teeny")


@pytest.mark.parametrize(
    "attention", ["leapformer", "leap", "leap,leapformer", "gated-delta", "gpt2"]
)
@pytest.mark.parametrize("vocab_size", [257, 32100])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_makes_a_model_with_any_vocabulary(preset, vocab_size, attention, monkeypatch):
    monkeypatch.setattr(TextTokenizer, "vocab_size", vocab_size)
    config = ModelConfig(preset=preset, attention=attention, n_layer=1)
    with torch.device("meta"):
        model = build_model(config, byte_tokenizer(), 16)
    assert model.config.vocab_size == vocab_size
    if preset in ("140m", "247m") and attention != "gpt2":
        assert model.config.adaptive_cutoffs == {257: None, 32100: [20_000]}[vocab_size]


def test_presets_are_measured_without_making_them():
    sizes = {size.name: size for size in preset_sizes()}
    assert sizes["tiny"].parameters == LeapformerForCausalLM(sizes["tiny"].config).num_parameters()
    assert 130e6 < sizes["140m"].parameters < 150e6
    assert all(size.state_bytes > 0 for size in sizes.values())


def test_positions_that_are_learned_limit_the_length():
    assert max_length(build(position_embedding="learned")) == 16
    assert max_length(build(attention="gpt2")) == 16
    assert max_length(build(position_embedding="none")) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: MambaForCausalLM(MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=9)),
        lambda: BloomForCausalLM(BloomConfig(hidden_size=8, n_layer=1, n_head=2, vocab_size=9)),
    ],
    ids=["mamba", "bloom"],
)
def test_models_that_know_no_positions_have_no_limit(make):
    assert max_length(make()) is None


def test_linear_attentions_fade_with_distance_unless_told_otherwise():
    for attention in ("linear", "cosformer", "elu-linear"):
        assert build(attention=attention).config.position_embedding == "alibi"
    assert build(proportion="learned").config.position_embedding == "alibi"
    for attention in ("leap", "softmax", "leap,leapformer"):
        assert build(attention=attention).config.position_embedding == "learned"
    assert build(position_embedding="learned").config.position_embedding == "learned"
    preset = build(preset="tiny", hidden_size=None, n_layer=None)
    assert preset.config.position_embedding == "none"


def test_a_run_is_loaded_with_its_tokenizer(trained):
    model, tokenizer = load_model(trained)
    assert not model.training
    assert tokenizer.vocab_size == model.config.vocab_size == 257
    same, _ = load_model(trained / "model")
    torch.testing.assert_close(same.state_dict(), model.state_dict())


def test_it_is_a_hugging_face_model_for_everyone(trained):
    model = AutoModelForCausalLM.from_pretrained(trained / "model")
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    inputs = tokenizer("Björn", return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=3, min_new_tokens=3).shape == (1, 9)


def test_a_run_that_goes_on_gives_its_best_so_far(copied):
    shutil.rmtree(copied / "model")
    (copied / "metrics.json").unlink()
    model, _ = load_model(copied)
    assert model.config.n_layer == 2
    shutil.rmtree(copied / "checkpoints")
    (copied / "checkpoints").mkdir()
    with pytest.raises(FileError, match="has no checkpoint yet"):
        load_model(copied)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileError, match=r"no run folder at .*/nothing; train a model"):
        load_model(tmp_path / "nothing")
    with pytest.raises(FileError, match="holds no model"):
        load_model(tmp_path)


def test_a_truncated_model_is_named(copied):
    path = copied / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(FileError, match=r"no model can be read from .*copy/model \(.*\); put") as e:
        load_model(copied)
    assert "\n" not in str(e.value)


def test_a_model_of_another_kind_is_named(copied):
    (copied / "model" / "config.json").write_text('{"model_type": "bart-like"}')
    with pytest.raises(FileError, match="no model can be read from"):
        load_model(copied)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named(copied, bad):
    path = copied / "model" / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"][3] = bad
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(FileError, match=r"copy/model hold NaN .* \(model\.norm\.weight\)"):
        load_model(copied)


OTHER_VALUES = (
    *(None, True, -1, 0, 7, 1000, 0.5, float("nan")),
    *("x", "", [], [1], {}, {"a": 1}),
)


def test_a_config_with_any_value_changed_works_or_is_an_error_in_a_line(copied):
    """Every field of the model's config, with values of every type."""
    path = copied / "model" / "config.json"
    config = json.loads(path.read_text())
    chance = random.Random(0)
    for name in config:
        for value in chance.sample(OTHER_VALUES, 4):
            path.write_text(json.dumps(config | {name: value}))
            try:
                model, tokenizer = load_model(copied)
                write_on(model, tokenizer, GenerateConfig(run=copied, tokens=2, temperature=1.0))
            except LeapError as error:
                assert "\n" not in str(error)


def test_so_does_one_of_a_run(copied, small):
    path = copied / "config.json"
    settings = json.loads(path.read_text())
    chance = random.Random(0)
    config = small(output=copied, position_embedding="none", attention="leap,leapformer")
    refused = 0
    for name in settings:
        for value in chance.sample(OTHER_VALUES, 4):
            path.write_text(json.dumps(settings | {name: value}))
            try:
                run_folder(config)
            except FileError as error:
                assert "\n" not in str(error)
                refused += 1
            load_model(copied)  # Which knows all it needs by itself.
    assert refused > 3 * len(settings)
    for content in ("", "[]", "3", "[" * 100_000, '{"a": NaN', "\udcff"):
        path.write_bytes(content.encode(errors="surrogateescape"))
        with pytest.raises(FileError, match=r"config\.json"):
            run_folder(config)


def test_a_model_of_other_sizes_is_named(copied):
    path = copied / "model" / "config.json"
    path.write_text(path.read_text().replace('"hidden_size": 16', '"hidden_size": 32'))
    with pytest.raises(FileError, match="no model can be read from"):
        load_model(copied)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"attention": "gpt2"}, r"lm_head\.weight is missing"),
        ({"attention": "leap"}, r"0\.block\.attention\.convolution\.weight is missing"),
        ({"n_layer": 1}, r"model\.layers\.1\..* is missing"),
        ({"position_embedding": "learned"}, r"model\.embed_positions\.weight is not its own"),
    ],
    ids=str,
)
def test_weights_of_another_model_are_named(other, message, tmp_path):
    for name, settings in (("model", {}), ("other", other)):
        build(**settings).save_pretrained(tmp_path / name)
    byte_tokenizer().save(tmp_path / "model")
    load_model(tmp_path / "model")
    shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path / "model")
    with pytest.raises(FileError, match=rf"weights in .*/model are of another .*{message}"):
        load_model(tmp_path / "model")


def test_a_tokenizer_that_does_not_fit_is_named(copied, play):
    train_tokenizer([play.read_text(encoding="utf-8")], 260).save(copied / "model")
    with pytest.raises(FileError, match=r"is not the one this model was trained with .260 tokens"):
        load_model(copied)
