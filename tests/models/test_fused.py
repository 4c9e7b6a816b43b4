"""Promises of decoding in one call: the tokens, logits and files of the plain way."""

import pytest
import torch

from leap import LeapformerConfig, LeapformerForCausalLM
from leap.models import StateCache
from leap.ops.backends import using
from leap.ops.native import library
from leap.ops.native import linear as native_linear
from leap.ops.tolerance import TOLERANCES, relative_error

pytestmark = pytest.mark.skipif(
    library.missing() is not None, reason=f"no native library: {library.missing()}"
)


def make_model(**options):
    sizes = {"vocab_size": 90, "hidden_size": 32, "n_layer": 2, "n_head": 2}
    model = LeapformerForCausalLM(LeapformerConfig(**sizes, **options)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def read(model, rows=2):
    ids = torch.randint(90, (rows, 9))
    with torch.no_grad():
        return ids, model(ids, use_cache=True).past_key_values


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_return_sequences": 2}], ids=str)
def test_generation_writes_the_same(options):
    model = make_model()
    ids, _ = read(model)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    sampled = {"do_sample": True} if "num_return_sequences" in options else {"do_sample": False}
    found = []
    for backend in (None, "torch"):
        torch.manual_seed(0)
        with using(backend):
            found.append(
                model.generate(ids, attention_mask=mask, max_new_tokens=8, **sampled, **options)
            )
    assert torch.equal(*found)


def test_assisted_generation_takes_drafts_back():
    model, draft = make_model(), make_model()
    ids, _ = read(model, rows=1)
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    found = model.generate(ids, max_new_tokens=8, do_sample=False, assistant_model=draft)
    assert torch.equal(found, expected)


def test_one_call_does_it_where_there_is_a_past():
    model = make_model()
    ids, cache = read(model)
    x = model.model.embed_tokens(ids[:, :1])
    assert "no gradient" in model.model.step_refusal(x, cache)
    with torch.no_grad():
        assert model.model.step_refusal(x, cache) is None
        assert "have read" in model.model.step_refusal(x, StateCache(2))
        other = make_model(position_embedding="learned", n_positions=20)
        assert "positions are added" in other.model.step_refusal(x, read(other)[1])
        dropped = make_model(hidden_dropout_prob=0.5).train()
        assert "dropout" in dropped.model.step_refusal(x, read(dropped)[1])


def test_what_was_kept_goes_to_a_file_and_back(tmp_path):
    model = make_model()
    ids, cache = read(model)
    with torch.no_grad():
        model(ids[:, :1], past_key_values=cache, use_cache=True)
        model.save_state(tmp_path / "state.safetensors", cache)
        loaded = model.load_state(tmp_path / "state.safetensors")
        assert cache.get_seq_length() == loaded.get_seq_length() == 10
        one, other = (
            model(ids[:, :1], past_key_values=each, use_cache=True).logits
            for each in (cache, loaded)
        )
    assert torch.equal(one, other)


def test_hidden_states_are_there_for_who_asks():
    model = make_model()
    ids, cache = read(model)
    with torch.no_grad():
        out = model(ids[:, :1], past_key_values=cache, use_cache=True, output_hidden_states=True)
    assert len(out.hidden_states) == 3


def test_to_have_asked_for_hidden_states_once_slows_no_later_token():
    model = make_model()
    ids, cache = read(model)
    x = model.model.embed_tokens(ids[:, :1])
    with torch.no_grad():
        model(ids, output_hidden_states=True)
        assert model.model.step_refusal(x, cache) is None
        for _ in range(2):  # And whoever asks is told, after tokens that went in one call too.
            model(ids[:, :1], past_key_values=cache, use_cache=True)
            out = model(
                ids[:, :1], past_key_values=cache, use_cache=True, output_hidden_states=True
            )
            assert len(out.hidden_states) == 3
        model.model.layers[1].register_forward_hook(lambda *_: None)
        assert "hooks" in model.model.step_refusal(x, cache)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 40, 64])
def test_a_head_of_few_rows_is_that_of_double_precision(rows):
    for n_in, n_out, bias in ((32, 90, None), (50, 77, torch.randn(77)), (3, 1, torch.randn(1))):
        x, weight = torch.randn(rows, 1, n_in), torch.randn(n_out, n_in)
        with torch.no_grad():
            assert native_linear.refusal(x, weight, bias) is None
            found = native_linear.linear(x, weight, bias)
        exact = torch.nn.functional.linear(
            *(t if t is None else t.double() for t in (x, weight, bias))
        )
        assert found.shape == exact.shape
        assert relative_error(found, exact) <= TOLERANCES[torch.float32].output


def test_a_head_that_is_more_than_its_weight_is_called():
    model = make_model()
    x = torch.randn(1, 1, 32)
    with torch.no_grad():
        model.lm_head.register_forward_hook(lambda *_: torch.zeros(()))
        assert model.head(x).numel() == 1
    assert "no gradient" in native_linear.refusal(x, model.lm_head.weight, None)
    with torch.no_grad():
        assert "64 rows" in native_linear.refusal(torch.randn(65, 32), model.lm_head.weight, None)
