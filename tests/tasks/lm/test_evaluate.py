import json
import math

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from leap.errors import ConfigError, FileError, InputError
from leap.tasks.lm.evaluate import EvalConfig, evaluate, score
from leap.tasks.lm.model import ModelConfig, build_model, load_model
from leap.tasks.lm.tokenizer import byte_tokenizer
from leap.tasks.lm.train import train

TEXT = ["Björn sees.\nSo\n", "a cat\n"]
TOKENIZER = byte_tokenizer()
N = len("".join(TEXT).encode()) + 2


def make(**settings):
    torch.manual_seed(1)
    settings = {
        "hidden_size": 16,
        "n_layer": 2,
        "n_head": 2,
        "position_embedding": "none",
    } | settings
    model = build_model(ModelConfig(**settings), TOKENIZER, 64).double()
    for parameter in model.parameters():
        parameter.data *= 4  # So that what was seen before matters.
    return model


def nats_one_by_one(model, context):
    """-log p of each token, from a run of its own over the last `context` tokens before it."""
    tokens = torch.tensor([256, *TOKENIZER.encode_documents(TEXT).tolist()])
    nats = []
    for i in range(1, len(tokens)):
        logits = model(input_ids=tokens[None, max(0, i - context) : i]).logits[0, -1]
        nats.append(-float(logits.log_softmax(-1)[tokens[i]]))
    return nats


@torch.no_grad()
@pytest.mark.parametrize("attention", ["leapformer", "leap", "gpt2"])
def test_perplexities_are_by_the_definition(attention):
    options = {"position_embedding": "learned"} if attention == "gpt2" else {}
    model = make(attention=attention, **options).eval()
    nats = sum(nats_one_by_one(model, N))
    found = score(model, TOKENIZER, TEXT, length=N)
    assert found.nats == pytest.approx(nats, rel=1e-6)
    assert (found.tokens, found.words, found.bytes) == (N, 8, N - 2)
    assert found.perplexity == pytest.approx(math.exp(found.nats / N))
    assert found.word_perplexity == pytest.approx(math.exp(found.nats / 8))
    assert found.bits_per_byte == pytest.approx(found.nats / math.log(2) / (N - 2))


@torch.no_grad()
def test_a_stride_of_one_shows_every_token_a_full_window():
    model = make().eval()
    found = score(model, TOKENIZER, TEXT, length=7, stride=1)
    assert found.nats == pytest.approx(sum(nats_one_by_one(model, 7)), rel=1e-6)


@pytest.mark.parametrize(
    "attention", ["leapformer", "leap", "linear", "softmax", "leap,leapformer"]
)
@pytest.mark.parametrize("length", [1, 7, N - 1, 100])
def test_carrying_the_state_is_one_pass_over_the_whole_text(attention, length):
    model = make(attention=attention)
    whole = score(model, TOKENIZER, TEXT, length=N)
    carried = score(model, TOKENIZER, TEXT, length=length, stateful=True)
    assert carried.nats == pytest.approx(whole.nats, rel=1e-6)


@torch.no_grad()
def test_a_carried_state_is_scored_in_stretches_each_as_long_as_all_before_it():
    model = make(position_embedding="none")
    n = len(TOKENIZER.encode_documents(TEXT))
    found = score(model, TOKENIZER, TEXT, length=2, stateful=True)
    ends = [2, 4, 8, 16, 32, 64, 128]
    assert [x.end for x in found.stretches] == [*(end for end in ends if end < n), n]
    assert [x.start for x in found.stretches] == [0, *(x.end for x in found.stretches[:-1])]
    truth = nats_one_by_one(model, n)
    for x in found.stretches:
        assert x.nats == pytest.approx(sum(truth[x.start : x.end]), rel=1e-5)
    assert score(model, TOKENIZER, TEXT, length=2).stretches == ()


@pytest.mark.parametrize(
    ("length", "stride"), [(7, None), (7, 7), (7, 3), (8, 5), (N, 2), (100, 1)]
)
def test_windows_score_every_token_once_whatever_the_batch(length, stride):
    model = make()
    for parameter in model.parameters():
        parameter.data.zero_()  # All tokens are equally likely.
    found = score(model, TOKENIZER, TEXT, length=length, stride=stride, batch=3)
    assert found.nats == pytest.approx(N * math.log(257), rel=1e-6)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_the_batch_does_not_matter(batch):
    model = make()
    first = score(model, TOKENIZER, TEXT, length=6, stride=4, batch=3)
    assert score(model, TOKENIZER, TEXT, length=6, stride=4, batch=batch).nats == pytest.approx(
        first.nats, rel=1e-6
    )


def test_more_to_see_is_told_apart():
    model = make()
    assert score(model, TOKENIZER, TEXT, length=3).nats != pytest.approx(
        score(model, TOKENIZER, TEXT, length=N).nats, rel=1e-3
    )


def test_a_state_cannot_be_carried_beyond_learned_positions():
    model = make(position_embedding="learned")
    long = ["x" * 64]
    with pytest.raises(
        ConfigError, match=r"learned 64 positions and cannot .* over 65 tokens; drop"
    ):
        score(model, TOKENIZER, long, stateful=True)
    with pytest.raises(ConfigError, match="length=65 is beyond the 64 positions"):
        score(model, TOKENIZER, long, length=65)


def test_a_model_without_a_state_to_carry_is_named():
    config = MambaConfig(vocab_size=257, hidden_size=8, state_size=2, num_hidden_layers=1)
    model = MambaForCausalLM(config)
    assert score(model, TOKENIZER, TEXT, length=8).tokens == N
    with pytest.raises(ConfigError, match=r"\(mamba\) gives no past_key_values .*; drop stateful"):
        score(model, TOKENIZER, TEXT, length=8, stateful=True)


@pytest.mark.parametrize(
    "settings", [{"length": 0}, {"stride": 0}, {"length": 4, "stride": 5}, {"batch": 0}], ids=str
)
def test_windows_that_cannot_work_are_named(settings):
    with pytest.raises(ConfigError, match="give 1 or more for each"):
        score(make(), TOKENIZER, TEXT, **settings)


def test_a_text_without_words_is_named():
    with pytest.raises(InputError, match="no words in this text"):
        score(make(), TOKENIZER, [""])


def test_a_run_is_evaluated_on_any_text(trained, play, tmp_path):
    told = []
    config = EvalConfig(
        run=trained, data=str(play), part="whole", stateful=True, output=tmp_path / "score.json"
    )
    found = evaluate(config, lambda status: told.append((status.step, status.steps)))
    text = play.read_text(encoding="utf-8")
    assert found.bytes == len(text.encode())
    assert told[-1] == (found.tokens, found.tokens)
    assert json.loads((tmp_path / "score.json").read_text())["perplexity"] == found.perplexity


def test_the_test_part_gives_what_training_reported(trained, play):
    metrics = json.loads((trained / "metrics.json").read_text())
    found = evaluate(EvalConfig(run=trained, data=str(play), length=32))
    assert found.stretches == () and metrics["test"].pop("stretches") == []
    numbers = {name: value for name, value in found.to_json().items() if name != "stretches"}
    assert numbers == pytest.approx(metrics["test"])


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("nowhere/score.json", r"no folder .*/nowhere to write score\.json to; make it first"),
        (".", r"is a folder; give a file to write the results to"),
    ],
)
def test_a_result_that_cannot_be_written_shows_before_the_work(
    output, message, trained, play, tmp_path
):
    told = []
    config = EvalConfig(run=trained, data=str(play), output=tmp_path / output)
    with pytest.raises(FileError, match=message):
        evaluate(config, lambda status: told.append((status.step, status.steps)))
    assert told == []


def test_the_text_is_told_before_the_work(trained, play):
    told = []
    config = EvalConfig(run=trained, data=str(play), length=32)
    evaluate(config, lambda *_: told.append("scored"), lambda corpus: told.append(corpus.name))
    assert told[:2] == [str(play), "scored"] and told.count(str(play)) == 1


def test_stateful_with_a_stride_is_an_error(trained):
    with pytest.raises(ConfigError, match="stateful and stride"):
        EvalConfig(run=trained, stateful=True, stride=3)


def test_a_state_is_carried_far_beyond_the_length_of_training(trained):
    model, tokenizer = load_model(trained)
    found = score(model, tokenizer, ["ab " * 2000], stateful=True, length=512)
    assert found.tokens == 6001 and math.isfinite(found.nats)


def test_a_learned_part_can_be_held_at_its_mean(small, play, tmp_path):
    run = tmp_path / "run"
    metrics = train(small(output=run, attention="leapformer", proportion="travelled"))
    plain = evaluate(EvalConfig(run=run, data=str(play)))
    held = evaluate(EvalConfig(run=run, data=str(play), equalise="proportions"))
    assert held.tokens == plain.tokens
    assert held.nats != plain.nats
    assert evaluate(EvalConfig(run=run, data=str(play))).nats == plain.nats
    assert metrics["equalised"] == {"proportions": pytest.approx(held.perplexity)}
    with pytest.raises(ConfigError, match="no such learned part; it has proportions"):
        evaluate(EvalConfig(run=run, data=str(play), equalise="gates"))
