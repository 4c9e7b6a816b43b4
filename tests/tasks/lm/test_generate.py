import math
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from leap.errors import ConfigError, FileError
from leap.models import StateCache
from leap.tasks.lm.generate import write_on
from leap.tasks.lm.model import ModelConfig, build_model, load_model
from leap.tasks.lm.tokenizer import byte_tokenizer, make_tokenizer, train_tokenizer
from leap.tasks.lm.writing import GenerateConfig, generate


@pytest.fixture(scope="module")
def loaded(trained):
    return load_model(trained)


@pytest.fixture
def config(trained):
    return GenerateConfig(run=trained, prompt="Björn ", tokens=20, temperature=0.0, past_end=True)


def test_greedy_text_is_what_the_model_finds_likeliest(loaded, config):
    model, tokenizer = loaded
    written = write_on(model, tokenizer, config)
    tokens = [tokenizer.eos_id, *tokenizer.encode(config.prompt).tolist()]
    for token in written.tokens:
        assert token == int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax())
        tokens.append(token)
    assert len(written.tokens) == 20
    assert written.text == tokenizer.decode(written.tokens)
    assert written.tokens_per_second > 0


def test_text_is_passed_on_as_it_is_made(loaded, config):
    pieces = []
    written = write_on(*loaded, config, pieces.append)
    assert len(pieces) > 10
    assert "".join(pieces) == written.text


@pytest.mark.parametrize("cuts", [[8], [1, 12], [19]], ids=str)
def test_continued_from_a_state_it_is_as_if_it_had_not_stopped(loaded, config, tmp_path, cuts):
    whole = write_on(*loaded, config)
    tokens = []
    ends = [*cuts, 20]
    for i, (start, end) in enumerate(zip([0, *cuts], ends, strict=True)):
        part = replace(
            config,
            tokens=end - start,
            prompt=config.prompt if i == 0 else "",
            state=tmp_path / "tale.safetensors",
        )
        tokens += write_on(*loaded, part).tokens
    assert tokens == whole.tokens


@pytest.mark.parametrize("cuts", [[8], [1, 12]], ids=str)
def test_so_are_random_numbers(loaded, config, tmp_path, cuts):
    config = replace(config, temperature=1.0)
    whole = write_on(*loaded, config)
    tokens = []
    for start, end in zip([0, *cuts], [*cuts, 20], strict=True):
        prompt = "" if tokens else config.prompt
        part = replace(config, tokens=end - start, prompt=prompt, state=tmp_path / "tale")
        torch.rand(3)  # What else is drawn in between changes nothing.
        tokens += write_on(*loaded, part).tokens
    assert tokens == whole.tokens


def test_with_a_seed_a_state_goes_on_with_its_random_numbers(loaded, config, tmp_path):
    config = replace(config, temperature=1.0)
    write_on(*loaded, replace(config, state=tmp_path / "tale"))
    texts = []
    for i, seed in enumerate((1, 1, 2, None)):
        state = tmp_path / str(i)
        state.write_bytes((tmp_path / "tale").read_bytes())
        texts.append(write_on(*loaded, replace(config, seed=seed, state=state)).tokens)
    assert texts[0] == texts[1]
    assert len(set(map(tuple, texts))) == 3


def test_a_state_file_has_the_mode_of_others(loaded, config, tmp_path):
    write_on(*loaded, replace(config, state=tmp_path / "tale"))
    (tmp_path / "other").write_text("")
    assert (tmp_path / "tale").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize(
    "kept", ["3", '{"unread": 3}', '{"unread": ["x"]}', '{"unread": [999999]}', "{"], ids=str
)
def test_what_a_state_says_of_its_text_is_checked(loaded, config, tmp_path, kept):
    path = tmp_path / "tale"
    write_on(*loaded, replace(config, state=path))
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() | {"leap.lm": kept}
    save_file(load_file(path), path, metadata=metadata)
    with pytest.raises(FileError, match="goes on"):
        write_on(*loaded, replace(config, state=path))


def test_random_numbers_that_are_none_are_named(loaded, config, tmp_path):
    path = tmp_path / "tale"
    write_on(*loaded, replace(config, state=path))
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(load_file(path) | {"random.cpu": torch.zeros(3)}, path, metadata=metadata)
    with pytest.raises(FileError, match="tale does not say how its text goes on"):
        write_on(*loaded, replace(config, state=path))


def test_a_prompt_can_follow_a_state(loaded, config, tmp_path):
    state = tmp_path / "tale.safetensors"
    first = write_on(*loaded, replace(config, tokens=5, state=state))
    then = write_on(*loaded, replace(config, prompt="So ", tokens=5, state=state))
    at_once = replace(config, prompt=config.prompt + first.text + "So ", tokens=5)
    assert then.tokens == write_on(*loaded, at_once).tokens


def test_a_state_stays_small_however_long_the_text(loaded, config, tmp_path):
    sizes = []
    for n in (100, 400):
        state = tmp_path / f"{n}.safetensors"
        written = write_on(*loaded, replace(config, prompt="x" * n, tokens=2, state=state))
        sizes.append((state.stat().st_size, written.state_bytes))
    assert sizes[0] == sizes[1]


def test_a_state_file_is_one_that_models_load(loaded, config, tmp_path):
    state = tmp_path / "tale.safetensors"
    write_on(*loaded, replace(config, state=state))
    assert isinstance(loaded[0].load_state(state), StateCache)


def test_writing_stops_where_a_text_ends(loaded, config):
    model, tokenizer = loaded
    weight = model.lm_head.weight.data
    kept = weight[tokenizer.eos_id].clone()
    hidden = []
    handle = model.model.norm.register_forward_hook(lambda *args: hidden.append(args[2]))
    write_on(model, tokenizer, replace(config, tokens=1))
    handle.remove()
    try:
        weight[tokenizer.eos_id] = 100 * hidden[0][0, -1]
        assert write_on(model, tokenizer, replace(config, past_end=False)).tokens == [256]
        assert len(write_on(model, tokenizer, config).tokens) == 20
    finally:
        weight[tokenizer.eos_id] = kept


def test_chance_is_the_same_from_the_same_seed(loaded, config):
    texts = [
        write_on(*loaded, replace(config, temperature=1.0, seed=seed)).tokens for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_one_of_one_is_no_choice(loaded, config):
    greedy = write_on(*loaded, config).tokens
    assert write_on(*loaded, replace(config, temperature=2.0, top_k=1)).tokens == greedy
    assert write_on(*loaded, replace(config, temperature=2.0, top_p=1e-9)).tokens == greedy


def test_without_a_prompt_a_new_text_begins(trained):
    config = GenerateConfig(run=trained, tokens=5, past_end=True)
    assert len(generate(config).tokens) == 5


def small(**settings):
    settings = {"hidden_size": 16, "n_layer": 2, "n_head": 2} | settings
    return build_model(ModelConfig(**settings), byte_tokenizer(), 16).eval()


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A tokenizer like SentencePiece's, whose tokens begin with the space before a word."""
    pieces = ["<unk>", "</s>", "▁Enter", "▁the", "▁king", "▁and", "▁his", "▁men", "s"]
    backend = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    backend.decoder = decoders.Metaspace()
    path = tmp_path_factory.mktemp("words") / "words.json"
    backend.save(str(path))
    return make_tokenizer(str(path))


@pytest.fixture(scope="module")
def wordy(words):
    """An untrained model of these words."""
    torch.manual_seed(0)
    settings = {"hidden_size": 16, "n_layer": 2, "n_head": 2, "position_embedding": "none"}
    return build_model(ModelConfig(**settings), words, 16).eval()


@pytest.mark.parametrize("prompt", ["Enter", "Enter the\nking", ""])
def test_the_space_after_the_prompt_is_written(words, wordy, config, prompt):
    for seed in range(10):
        request = replace(config, prompt=prompt, tokens=3, temperature=1.0, seed=seed)
        written = write_on(wordy, words, request)
        whole = words.decode([*words.encode(prompt).tolist(), *written.tokens])
        assert prompt + written.text == whole


def test_a_space_that_the_prompt_ends_with_is_not_written_again(words, wordy, config):
    assert words.encode("Enter ").tolist() == words.encode("Enter").tolist()
    for seed in range(10):
        request = replace(config, prompt="Enter ", tokens=3, temperature=1.0, seed=seed)
        assert not write_on(wordy, words, request).text.startswith(" ")


def test_the_space_where_a_state_goes_on_is_written(words, wordy, config, tmp_path):
    for seed in range(10):
        state = tmp_path / f"{seed}.safetensors"
        request = replace(config, prompt="Enter", tokens=3, temperature=1.0, seed=seed, state=state)
        parts = [write_on(wordy, words, replace(request, prompt=p)) for p in ("Enter", "")]
        tokens = [token for part in parts for token in part.tokens]
        whole = words.decode([*words.encode("Enter").tolist(), *tokens])
        assert "Enter" + "".join(part.text for part in parts) == whole


def test_a_prompt_beyond_learned_positions_is_an_error_that_says_so(config):
    for model in (small(position_embedding="learned"), small(attention="gpt2")):
        with pytest.raises(ConfigError, match=r"11 tokens read and 20 .* the 16 positions"):
            write_on(model, byte_tokenizer(), replace(config, prompt="x" * 10))
        fits = replace(config, prompt="x" * 10, tokens=6)
        assert len(write_on(model, byte_tokenizer(), fits).tokens) == 6


def test_gpt2_has_no_state_to_keep(config, tmp_path):
    with pytest.raises(ConfigError, match=r"this model \(gpt2\) keeps all it has read"):
        write_on(small(attention="gpt2"), byte_tokenizer(), replace(config, state=tmp_path / "x"))


def test_a_state_of_another_model_or_tokenizer_is_named(loaded, config, play, tmp_path):
    state = tmp_path / "tale.safetensors"
    write_on(*loaded, replace(config, state=state, tokens=2))
    again = replace(config, state=state)
    with pytest.raises(FileError, match=r"tale\.safetensors holds the state of another model"):
        write_on(small(position_embedding="none"), byte_tokenizer(), again)
    other = train_tokenizer([play.read_text(encoding="utf-8")], 257)
    with pytest.raises(FileError, match=r"tale\.safetensors was written with another tokenizer"):
        write_on(loaded[0], other, again)


def test_a_broken_state_is_named_and_left_alone(loaded, config, tmp_path):
    state = tmp_path / "tale.safetensors"
    write_on(*loaded, replace(config, state=state, tokens=2))
    content = state.read_bytes()[:-100]
    state.write_bytes(content)
    with pytest.raises(FileError, match=r"tale\.safetensors is not a whole safetensors file"):
        write_on(*loaded, replace(config, state=state))
    assert state.read_bytes() == content
    save_file({"x": torch.zeros(1)}, state)
    with pytest.raises(FileError, match=r"tale\.safetensors holds no state"):
        write_on(*loaded, replace(config, state=state))
    assert set(load_file(state)) == {"x"}


def test_a_state_that_a_model_saved_needs_a_prompt(loaded, config, tmp_path):
    model, tokenizer = loaded
    state = tmp_path / "tale.safetensors"
    read = model(input_ids=torch.tensor([[256, 65]]), use_cache=True).past_key_values
    model.save_state(state, read)
    with pytest.raises(FileError, match="does not say how its text goes on; give a prompt"):
        write_on(model, tokenizer, replace(config, prompt="", state=state))
    written = write_on(model, tokenizer, replace(config, prompt="B", state=state, tokens=3))
    assert (
        written.tokens == write_on(model, tokenizer, replace(config, prompt="AB", tokens=3)).tokens
    )


def test_a_state_in_a_missing_folder_shows_before_the_work(loaded, config, tmp_path):
    with pytest.raises(FileError, match=r"no folder .*/nowhere to keep the state in"):
        write_on(*loaded, replace(config, state=tmp_path / "nowhere" / "tale"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": 0}, "tokens=0 must be 1 or more"),
        ({"temperature": -1.0}, r"temperature=-1\.0 must be 0 or more"),
        ({"temperature": math.nan}, "temperature=nan must be 0 or more"),
        ({"top_k": 0}, "top_k=0 must be 1 or more"),
        ({"top_p": 0.0}, r"top_p=0\.0 must be more than 0"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_named(trained, settings, message):
    with pytest.raises(ConfigError, match=message):
        GenerateConfig(run=trained, **settings)
