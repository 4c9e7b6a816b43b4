"""Promises of attn_implementation="leapformer" in other people's models."""

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    T5Config,
)

import leap
from leap.errors import ConfigError, InputError

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def make_bert():
    torch.manual_seed(0)
    model = AutoModel.from_config(
        BertConfig(**SIZES, hidden_dropout_prob=0, attention_probs_dropout_prob=0),
        attn_implementation="leapformer",
    )
    return model.double().eval()


def make_llama():
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_key_value_heads=2, pad_token_id=0, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="leapformer")
    return model.double().eval()


def make_ids(*shape, seed=0):
    return torch.randint(1, 61, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("proportions", [False, True])
def test_an_encoder_sees_both_ways_and_no_pads(proportions):
    model = make_bert()
    if proportions:
        leap.with_proportions(model).double()
    ids = make_ids(2, 9)
    expected = model(ids).last_hidden_state
    mask = torch.tensor([[1] * 9 + [0] * 3] * 2)
    padded = torch.cat([ids, make_ids(2, 3, seed=1)], dim=1)
    assert_close(model(padded, attention_mask=mask).last_hidden_state[:, :9], expected)
    edited = ids.clone()
    edited[:, -1] = 5
    assert not torch.equal(model(edited).last_hidden_state[:, 0], expected[:, 0])


@pytest.mark.parametrize("proportions", [False, True])
def test_a_decoder_does_not_see_the_future_and_generates_the_same_with_its_cache(proportions):
    model = make_llama()
    if proportions:
        leap.with_proportions(model).double()
    ids = make_ids(2, 12)
    edited = ids.clone()
    edited[:, 8:] = make_ids(2, 4, seed=1)
    assert_close(model(ids).logits[:, :8], model(edited).logits[:, :8])
    cached = model.generate(ids, max_new_tokens=10, do_sample=False)
    plain = model.generate(ids, max_new_tokens=10, do_sample=False, use_cache=False)
    assert torch.equal(cached, plain)


def test_proportions_learn():
    model = leap.with_proportions(make_llama()).double()
    ids = make_ids(2, 12)
    model(ids, labels=ids).loss.backward()
    gradients = [p.grad for name, p in model.named_parameters() if "proportion" in name]
    assert gradients
    assert all(g is not None and g.abs().max() > 0 for g in gradients)


@pytest.mark.parametrize("make", [make_bert, make_llama])
def test_a_saved_model_comes_back_with_its_proportions(make, tmp_path):
    model = leap.with_proportions(make(), hidden=5)
    model.save_pretrained(tmp_path)
    kind = AutoModel if make is make_bert else AutoModelForCausalLM
    again = kind.from_pretrained(tmp_path, dtype="auto").eval()
    ids = make_ids(2, 12)
    assert_close(again(ids)[0], model(ids)[0])
    again.save_pretrained(tmp_path / "again")
    assert_close(kind.from_pretrained(tmp_path / "again", dtype="auto")(ids)[0], model(ids)[0])


def test_pads_before_a_text_change_nothing_where_positions_leave_them_out():
    model, ids = make_llama(), make_ids(2, 9)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[:, :3] = 0
    padded = torch.cat([make_ids(2, 3, seed=1), ids], dim=1)
    with pytest.raises(InputError, match=r"position_ids count pads.*relu follows the rotation"):
        model(padded, attention_mask=mask)
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(0)}
    assert_close(model(padded, **given).logits[:, 3:], model(ids).logits)
    options = {"max_new_tokens": 6, "do_sample": False}
    written = model.generate(padded, attention_mask=mask, **options)[:, 12:]
    assert torch.equal(written, model.generate(ids, **options)[:, 9:])
    right = torch.cat([ids, make_ids(2, 3, seed=1)], dim=1)
    assert_close(model(right, attention_mask=mask.flip(1)).logits[:, :9], model(ids).logits)


def test_biases_of_pairs_are_an_error_rather_than_dropped():
    config = T5Config(
        vocab_size=61, d_model=16, d_ff=32, num_layers=1, num_heads=4, d_kv=4, pad_token_id=0
    )
    model = AutoModel.from_config(config, attn_implementation="leapformer")
    ids = make_ids(1, 9)
    with pytest.raises(ConfigError, match=r"position_bias is for scores of pairs .* or 'eager'"):
        model(ids, decoder_input_ids=ids)
    kinds = ["full_attention"] * 2
    config = Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=4, layer_types=kinds)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="leapformer")
    with pytest.raises(ConfigError, match="softcap is for scores of pairs"):
        model(ids)


def test_a_window_is_an_error_rather_than_ignored():
    config = MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=4)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="leapformer")
    with pytest.raises(ConfigError, match=r"sliding_window=4 .* sees everything; set .* to None"):
        model(make_ids(1, 9))
    config.sliding_window = None
    model = AutoModelForCausalLM.from_config(config, attn_implementation="leapformer")
    assert model(make_ids(1, 9)).logits.shape == (1, 9, 61)


def test_packed_sequences_are_an_error_rather_than_mixed():
    model = make_llama()
    ids, starts = make_ids(1, 9), torch.tensor([0, 4, 9])
    places = torch.cat([torch.arange(4), torch.arange(5)])[None]
    for packed in ({"cu_seq_lens_q": starts}, {"position_ids": places}):
        with pytest.raises(InputError, match=r"cu_seq_lens_q=\[0, 4, 9\].*see one another; pad"):
            model(ids, **packed)


def test_a_model_without_attention_is_named():
    with pytest.raises(ConfigError, match="no attention layer of Linear was recognised"):
        leap.with_proportions(torch.nn.Linear(2, 2))
