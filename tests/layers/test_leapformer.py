import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from leap.errors import ConfigError, InputError
from leap.layers import LeapformerAttention, SoftmaxAttention
from leap.ops.features import feature_map, rotary

LENGTH = 7


def build(**options):
    layer = LeapformerAttention(12, 3, **options).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def split(x):
    return x.unflatten(-1, (3, -1)).transpose(1, 2)


def join(x):
    return x.transpose(1, 2).flatten(-2)


def definition(layer, x, source, sees):
    """Formulas 1.1 and 1.2 of the paper as written, `sees` true where query i sees key j."""
    q, k = split(layer.q_proj(x)).relu(), split(layer.k_proj(source)).relu()
    v = split(layer.v_proj(source))
    p, s = layer.q_proportion.net(q).sigmoid(), layer.k_proportion.net(k).sigmoid()
    scores = (q @ k.mT) * torch.cos(math.pi / 2 * (p - s.mT)) * sees
    attended = scores @ v / scores.sum(-1, keepdim=True).clamp_min(layer.eps)
    return layer.o_proj(join(attended))


CAUSAL = torch.ones(LENGTH, LENGTH).tril()


def test_causal_attention_is_the_definition(make_tokens, assert_same):
    layer, x = build(), make_tokens(LENGTH)
    assert_same(layer(x)[0], definition(layer, x, x, CAUSAL), layer, x)


def test_bidirectional_attention_is_the_definition(make_tokens, assert_same):
    layer, x = build(form="bidirectional"), make_tokens(LENGTH)
    assert_same(layer(x)[0], definition(layer, x, x, torch.ones(LENGTH, LENGTH)), layer, x)


def test_cross_attention_is_the_definition(make_tokens, assert_same):
    layer, x, source = build(form="cross"), make_tokens(4), make_tokens(LENGTH, seed=1)
    expected = definition(layer, x, source, torch.ones(4, LENGTH))
    assert_same(layer(x, source=source)[0], expected, layer, x, source)


def test_a_schedule_is_the_definition(make_tokens, assert_same):
    layer, x, source = build(form="cross"), make_tokens(4), make_tokens(LENGTH, seed=1)
    visible = torch.tensor([[0, 2, 2, 7], [1, 3, 5, 6]])
    sees = (torch.arange(LENGTH) < visible.unsqueeze(-1)).unsqueeze(1)
    actual, _ = layer(x, source=source, visible=visible)
    assert_same(actual, definition(layer, x, source, sees), layer, x, source)


VARIANTS = {
    "leapformer": {},
    "norm": {"normaliser": "norm"},
    "cubic": {"feature": "cubic"},
    "cosformer": {"proportion": "fixed", "length": 20},
    "rotary": {"rotary": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_source_may_arrive_while_it_is_attended_to(variant, make_tokens, assert_same):
    layer = build(form="cross", **VARIANTS[variant])
    x, source = make_tokens(4), make_tokens(LENGTH, seed=1)
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 0, 1]]).bool()
    whole, final = layer(x, source=source, key_mask=mask, visible=torch.tensor([3, 3, 5, 7]))

    at = torch.arange(4).expand(2, 4)
    _, state = layer(x[:, :0], source=source[:, :3], key_mask=mask[:, :3])
    first, state = layer(x[:, :2], state, positions=at[:, :2])
    second, state = layer.step(
        x[:, 2], state, source=source[:, 3:5], key_mask=mask[:, 3:5], positions=at[:, 2:3]
    )
    third, state = layer.step(
        x[:, 3], state, source=source[:, 5:], key_mask=mask[:, 5:], positions=at[:, 3:]
    )
    assert_same(torch.cat([first, second[:, None], third[:, None]], 1), whole, layer, x, source)
    assert_close(state.tensors(), final.tensors())


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_encoder_fed_in_chunks_is_chunk_causal(variant, make_tokens, assert_same):
    layer, x = build(form="bidirectional", **VARIANTS[variant]), make_tokens(LENGTH)
    ends = torch.tensor([3, 3, 3, 5, 5, 7, 7])
    whole, final = layer(x, visible=ends)
    chunks, state = [], None
    for chunk in x.split([3, 2, 2], dim=1):
        y, state = layer(chunk, state)
        chunks.append(y)
    assert_same(torch.cat(chunks, dim=1), whole, layer, x)
    assert_close(state.tensors(), final.tensors())


def test_reads_of_a_source_can_be_taken_back(make_tokens):
    layer = build(form="cross")
    x, source = make_tokens(4), make_tokens(LENGTH, seed=1)
    _, state = layer(x[:, :0], source=source[:, :3])
    expected, _ = layer(x, state)
    for mask in (None, torch.ones(2, 4, dtype=torch.bool)):
        _, longer = layer(x, state.record(), source=source[:, 3:], key_mask=mask)
        assert_close(layer(x, longer.rollback(4))[0], expected)


@pytest.mark.parametrize("form", ["causal", "bidirectional"])
def test_cosformer_is_leapformer_with_fixed_proportions(form, make_tokens, assert_same):
    layer, x = build(proportion="fixed", length=10, form=form), make_tokens(LENGTH)
    q, k = split(layer.q_proj(x)).relu(), split(layer.k_proj(x)).relu()
    i = torch.arange(1, LENGTH + 1).double()
    scores = (q @ k.mT) * torch.cos(math.pi / 2 * (i[:, None] - i) / 10)
    scores = scores * (CAUSAL if form == "causal" else 1)
    attended = scores @ split(layer.v_proj(x)) / scores.sum(-1, keepdim=True).clamp_min(1e-6)
    assert_same(layer(x)[0], layer.o_proj(join(attended)), layer, x)

    learned = build(form=form)
    learned.load_state_dict(layer.state_dict(), strict=False)
    learned.q_proportion, learned.k_proportion = layer.q_proportion, layer.k_proportion
    learned.looks_at_positions = True
    assert_close(learned(x)[0], layer(x)[0], rtol=1e-12, atol=1e-12)


def test_an_encoding_cosformer_takes_each_row_s_own_length(make_tokens):
    layer, x = build(proportion="fixed", form="bidirectional"), make_tokens(LENGTH)
    mask = torch.arange(LENGTH) < torch.tensor([[4], [LENGTH]])
    y, _ = layer(x, key_mask=mask)
    short = build(proportion="fixed", form="bidirectional", length=4)
    short.load_state_dict(layer.state_dict())
    assert_close(y[:1, :4], short(x[:1, :4])[0])


@pytest.mark.parametrize("form", ["causal", "bidirectional"])
def test_constant_proportions_are_plain_linear_attention(form, make_tokens):
    learned, plain = build(form=form), build(form=form, proportion="none")
    plain.load_state_dict(learned.state_dict(), strict=False)
    for proportion in (learned.q_proportion, learned.k_proportion):
        for parameter in proportion.parameters():
            torch.nn.init.zeros_(parameter)
    x = make_tokens(LENGTH)
    p, s = learned.proportions(x)
    assert (p == 0.5).all() and (s == 0.5).all()
    assert_close(learned(x)[0], plain(x)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("feature", ["relu", "elu_plus_one", "square", "exp", "sinh"])
def test_any_feature_map_will_do(feature, make_tokens, assert_same):
    layer, x = build(feature=feature, proportion="none"), make_tokens(LENGTH)
    phi = feature_map(feature).key
    q, k = phi(split(layer.q_proj(x))), phi(split(layer.k_proj(x)))
    scores = (q @ k.mT).tril()
    attended = scores @ split(layer.v_proj(x)) / scores.sum(-1, keepdim=True).clamp_min(1e-6)
    assert_same(layer(x)[0], layer.o_proj(join(attended)), layer, x)
    same = build(feature=feature_map(feature), proportion="none")
    same.load_state_dict(layer.state_dict())
    assert torch.equal(same(x)[0], layer(x)[0])


@pytest.mark.parametrize("feature", ["cubic", "neg_sinh"])
def test_signed_scores_are_divided_by_their_magnitudes(feature, make_tokens, assert_same):
    layer, x = build(feature=feature, proportion="none"), make_tokens(LENGTH)
    phi = feature_map(feature).key
    q, k, v = phi(split(layer.q_proj(x))), phi(split(layer.k_proj(x))), split(layer.v_proj(x))
    magnitudes = (q.abs() @ k.abs().mT).tril().sum(-1, keepdim=True)
    attended = (q @ k.mT).tril() @ v / magnitudes
    assert_same(layer(x)[0], layer.o_proj(join(attended)), layer, x)
    assert attended.abs().max() <= v.abs().max()


def test_rotary_turns_the_scores_but_not_their_sum(make_tokens, assert_same):
    layer = build(feature="elu_plus_one", rotary=True, proportion="none")
    x, phi = make_tokens(LENGTH), feature_map("elu_plus_one").key
    q, k, v = phi(split(layer.q_proj(x))), phi(split(layer.k_proj(x))), split(layer.v_proj(x))
    attended = (rotary(q) @ rotary(k).mT).tril() @ v / (q @ k.mT).tril().sum(-1, keepdim=True)
    assert_same(layer(x)[0], layer.o_proj(join(attended)), layer, x)


def test_a_norm_may_take_the_place_of_the_denominator(make_tokens, assert_same):
    layer, x = build(proportion="none", normaliser="norm", feature="exp"), make_tokens(LENGTH)
    q, k, v = (split(proj(x)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    q = (q - q.amax(-1, keepdim=True)).exp()
    q = q / 2  # the power of two above its largest feature, 1
    weighted = (q @ k.exp().mT).tril() @ v
    mean_square = weighted.square().mean(-1, keepdim=True)
    attended = weighted * (mean_square + 1e-6).rsqrt() * layer.norm.weight
    assert_same(layer(x)[0], layer.o_proj(join(attended)), layer, x)


@pytest.mark.parametrize(
    "options", [{"normaliser": "norm", "feature": "elu_plus_one"}, {"feature": "cubic"}], ids=str
)
def test_a_sum_not_divided_yet_may_be_more_than_half_precision_holds(options, make_tokens):
    layer, x = build(proportion="none", **options), 2 * make_tokens(600).detach()
    torch.nn.init.constant_(layer.v_proj.bias, 50)  # so that values do not cancel
    expected, _ = layer(x)
    actual, _ = layer.half()(x.half())
    assert_close(actual.double(), expected, rtol=0.1, atol=0.1 * expected.abs().max().item())


def test_queries_may_be_scaled_before_they_are_mapped(make_tokens):
    layer, scaled = build(), build(scale_query=True)
    scaled.load_state_dict(layer.state_dict())
    with torch.no_grad():
        layer.q_proj.weight /= math.sqrt(4)
        layer.q_proj.bias /= math.sqrt(4)
    x = make_tokens(LENGTH)
    assert_close(layer(x)[0], scaled(x)[0])


def test_proportions_may_be_read_off_projections(make_tokens):
    layer, x = build(proportion_input="projections"), make_tokens(LENGTH)
    p, s = layer.proportions(x)
    assert_close(p, layer.q_proportion(split(layer.q_proj(x))))
    assert_close(s, layer.k_proportion(split(layer.k_proj(x))))


@pytest.mark.parametrize(
    "options", [{}, {"feature": "cubic"}, {"proportion": "fixed", "length": 9}]
)
def test_proportions_can_be_looked_at(options, make_tokens):
    layer, x = build(form="cross", **options), make_tokens(LENGTH)
    p, s = layer.proportions(x, source=x[:, :3])
    assert p.shape == (2, 3, LENGTH) and s.shape == (2, 3, 3)
    assert (p > 0).all() and (p <= 1).all()
    if options.get("proportion") == "fixed":
        assert_close(s[0, 0], torch.arange(1, 4).double() / 9)


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_a_gate_forgets(gate, make_tokens, assert_same):
    layer, x = build(gate=gate, proportion="none"), make_tokens(LENGTH)
    q, k = split(layer.q_proj(x)).relu(), split(layer.k_proj(x)).relu()
    log_gate = F.logsigmoid(layer.gate.net(x))
    log_gate = split(log_gate) if gate == "channel" else log_gate.transpose(1, 2).unsqueeze(-1)
    total = log_gate.cumsum(2)
    kept = (total.unsqueeze(3) - total.unsqueeze(2)).exp()
    scores = (q.unsqueeze(3) * k.unsqueeze(2) * kept).sum(-1).tril()
    attended = scores @ split(layer.v_proj(x)) / scores.sum(-1, keepdim=True).clamp_min(1e-6)
    assert_same(layer(x)[0], layer.o_proj(join(attended)), layer, x)


@pytest.mark.parametrize("gate", ["head", "channel"])
@pytest.mark.parametrize("proportion", ["learned", "none"])
def test_a_gate_of_one_forgets_nothing(gate, proportion, make_tokens):
    gated, plain = build(gate=gate, proportion=proportion), build(proportion=proportion)
    plain.load_state_dict(gated.state_dict(), strict=False)
    for name, parameter in gated.gate.named_parameters():
        torch.nn.init.constant_(parameter, 1000.0 if name.endswith("bias") else 0.0)
    x = make_tokens(LENGTH)
    assert_close(gated(x)[0], plain(x)[0], rtol=1e-12, atol=1e-12)


def n_parameters(**options):
    return sum(p.numel() for p in LeapformerAttention(64, 2, **options).parameters())


def test_parameter_counts_are_the_paper_s():
    softmax = sum(p.numel() for p in SoftmaxAttention(64, 2).parameters())
    assert softmax == 4 * (64 * 64 + 64)
    assert n_parameters(proportion="none") == softmax
    assert n_parameters(proportion="fixed", length=9) == softmax
    assert n_parameters() == softmax + 2 * (32 * 16 + 2 * 16 + 1) == softmax + 1090
    assert n_parameters(proportion_hidden=8) == softmax + 1092 // 2
    assert n_parameters(proportion_hidden=1) == softmax + 66
    assert n_parameters(proportion_step_down=4) == softmax + 546


def test_dropout_falls_on_attended_values_in_training_alone(make_tokens):
    layer, x = build(dropout=0.5, bias=False), make_tokens(LENGTH)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    assert torch.equal(layer.eval()(x)[0], layer(x)[0])
    always = build(dropout=1.0, bias=False)
    assert (always(x)[0] == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature": "rleu"}, r"'rleu'.*relu, elu_plus_one"),
        (
            {"proportion": "half"},
            r"proportion='half' is not known; there are travelled, learned, fixed, none",
        ),
        ({"proportion_input": "x"}, r"proportion_input='x'.*features, projections"),
        ({"normaliser": "softmax"}, r"normaliser='softmax'.*denominator, norm"),
        ({"gate": "token"}, r"gate='token'.*head, channel"),
        ({"form": "sideways"}, r"form='sideways'.*causal, bidirectional, cross"),
        ({"gate": "channel", "form": "bidirectional"}, r"gate='channel'.*with form='causal'"),
        ({"alibi": True, "form": "cross"}, r"alibi is for form='causal'"),
        ({"places": "divided", "proportion": "travelled"}, r"places='divided'.*'bidirectional'"),
        ({"clocks": 0, "proportion": "travelled"}, r"clocks=0"),
        ({"gate": "head", "form": "cross"}, r"gate='head'.*use it with form='causal'"),
        ({"proportion": "fixed"}, r"give length"),
        ({"proportion": "fixed", "form": "cross"}, r"give length"),
        ({"proportion_step_down": 3}, r"step_down=3"),
        ({"rotary": True, "hidden_size": 9}, r"hidden_size=9 / n_head=3 = 3 .*even"),
    ],
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_settings_are_errors_that_say_what_would_work(options, message):
    with pytest.raises(ConfigError, match=message):
        LeapformerAttention(**{"hidden_size": 12, "n_head": 3} | options)


@pytest.mark.parametrize("kind", [LeapformerAttention, SoftmaxAttention])
@pytest.mark.parametrize(
    ("form", "inputs", "message"),
    [
        ("causal", {"source": 3}, r"a source is for form='cross'; .* form='causal'"),
        ("bidirectional", {"source": 3}, r"a source is for form='cross'"),
        ("causal", {"visible": [1, 2, 3]}, r"visible is for form='bidirectional' and 'cross'"),
        ("cross", {}, r"nothing to attend to: give a source, or a state"),
        ("cross", {"source": 3, "visible": [1, 2, 4]}, r"visible runs from 1 to 4; with 3 keys"),
        ("cross", {"source": 3, "visible": [2, 1, 3]}, r"visible falls"),
        ("cross", {"source": 3, "cu_seqlens": [0, 3]}, r"cu_seqlens does not go with"),
        ("bidirectional", {"visible": [1, 2, 3], "state": True}, r"does not go with a state"),
    ],
)
def test_inputs_that_do_not_fit_the_form_are_errors(kind, form, inputs, message, make_tokens):
    layer, x = kind(12, 3, form=form).double(), make_tokens(3)
    make = {"source": make_tokens, "state": lambda _: layer(x)[1]}
    given = {name: make.get(name, torch.tensor)(value) for name, value in inputs.items()}
    with pytest.raises(InputError, match=message):
        layer(x, **given)


def test_a_length_of_each_row_s_own_does_not_go_with_pieces(make_tokens):
    layer, x = build(proportion="fixed", form="bidirectional"), make_tokens(3)
    for inputs in ({"state": layer(x)[1]}, {"visible": torch.tensor([1, 2, 3])}):
        with pytest.raises(InputError, match="needs whole sequences"):
            layer(x, **inputs)


def test_a_cosformer_that_outgrows_its_length_says_so(make_tokens):
    layer, x = build(proportion="fixed", length=8), make_tokens(LENGTH)
    _, state = layer(x)
    _, state = layer.step(x[:, 0], state)
    with pytest.raises(InputError, match="position 8 lies beyond length=8"):
        layer.step(x[:, 0], state)


def test_a_later_query_of_a_source_must_give_its_position(make_tokens):
    layer, x = build(proportion="fixed", length=8, form="cross"), make_tokens(3)
    _, state = layer(x, source=x)
    with pytest.raises(InputError, match="give positions"):
        layer(x, state)
    assert layer(x[:, :0], state, source=x)[0].shape == (2, 0, 12)


def test_there_are_no_proportions_without_a_proportion(make_tokens):
    with pytest.raises(ConfigError, match="proportion='none'"):
        build(proportion="none").proportions(make_tokens(3))
    with pytest.raises(ConfigError, match="give the source"):
        build(form="cross").proportions(make_tokens(3))


@pytest.mark.parametrize("form", ["bidirectional", "cross"])
def test_a_state_of_another_layer_is_an_error(form, make_tokens):
    layer, other = build(form=form), build(form=form, proportion="none")
    x = make_tokens(3)
    source = {"source": x} if form == "cross" else {}
    _, state = other(x, **source)
    with pytest.raises(InputError):
        layer(x, state, **source)
    if form == "cross":
        with pytest.raises(InputError):
            layer(x, state)
