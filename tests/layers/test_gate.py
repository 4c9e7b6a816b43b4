import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from leap.layers import ForgetGate, LeapformerAttention, SoftmaxAttention
from leap.models import LeapformerConfig, LeapformerForCausalLM


@pytest.mark.parametrize("n_channel", [None, 4])
def test_a_gate_is_the_definition(n_channel, make_tokens):
    gate, x = ForgetGate(12, 3, n_channel).double(), make_tokens(7)
    expected = F.logsigmoid(gate.net(x))
    if n_channel is not None:
        expected = expected.unflatten(-1, (3, 4))
    assert_close(gate(x), expected.transpose(1, 2))
    assert gate(x).shape == ((2, 3, 7) if n_channel is None else (2, 3, 7, 4))


def memories(gate):
    """For how many tokens the heads of a fresh gate remember, where x says nothing."""
    log_gate = gate(torch.zeros(1, 1, gate.net[0].in_features))
    return 1 / -log_gate.expm1().flatten(1)[0]


@pytest.mark.parametrize("n_channel", [None, 2])
def test_fresh_heads_remember_from_4_to_1024_tokens_in_equal_ratios(n_channel):
    expected = torch.tensor([4.0, 64.0, 1024.0]).repeat_interleave(n_channel or 1)
    assert_close(memories(ForgetGate(12, 3, n_channel)), expected, rtol=1e-3, atol=0)
    alone = torch.full((n_channel or 1,), 256.0)
    assert_close(memories(ForgetGate(12, 1, n_channel)), alone, rtol=1e-3, atol=0)


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_a_fresh_gate_says_nearly_the_same_of_all_tokens(gate):
    module = ForgetGate(64, 4, None if gate == "head" else 16)
    log_gate = module(torch.randn(2, 100, 64))
    assert (log_gate.std(dim=2) < 0.5 * log_gate.mean(dim=2).abs()).all()
    assert (log_gate.std(dim=2) > 0).all()


@pytest.mark.parametrize(
    ("attention", "gate"), [("linear", "head"), ("linear", "channel"), ("softmax", "head")]
)
def test_a_model_keeps_the_beginning_of_its_gates(attention, gate):
    config = LeapformerConfig(
        vocab_size=9, hidden_size=16, n_layer=1, n_head=2, attention=attention, gate=gate
    )
    model = LeapformerForCausalLM(config)
    found = next(module for module in model.modules() if isinstance(module, ForgetGate))
    assert torch.equal(found.last.bias, found.fresh_bias())
    assert 0 < found.last.weight.std() < 0.05


@pytest.mark.parametrize("form", ["causal", "bidirectional", "cross"])
@pytest.mark.parametrize("kind", [LeapformerAttention, SoftmaxAttention])
def test_an_output_gate_multiplies_what_comes_out(kind, form):
    torch.manual_seed(0)
    layer, plain = (kind(8, 2, form=form, output_gate=gate).double() for gate in (True, False))
    plain.load_state_dict(layer.state_dict(), strict=False)
    plain.o_proj = torch.nn.Identity()
    x, source = torch.randn(2, 1, 7, 8).double().unbind(0)
    given = {"source": source} if form == "cross" else {}
    expected = layer.o_proj(plain(x, **given)[0] * layer.output_gate(x).sigmoid())
    assert_close(layer(x, **given)[0], expected)
