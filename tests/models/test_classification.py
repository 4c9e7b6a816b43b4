"""Promises of the classifier: one encoder, whichever attention it has."""

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification

import leap
from leap.errors import ConfigError, InputError
from leap.models import LeapformerConfig, LeapformerForSequenceClassification, usable_as
from leap.models.classification import last_of, mean_of

TEXT = {  # The model of Long Range Arena's Text.
    "vocab_size": 512,
    "hidden_size": 64,
    "n_positions": 4096,
    "n_layer": 2,
    "n_head": 2,
    "intermediate_size": 128,
    "classifier_size": 128,
    "num_labels": 2,
}
POOLINGS = ["mean", "cls", "last"]


def build(pooling="mean", attention="leapformer", **changes):
    """A tiny model, in double precision."""
    options = {
        "vocab_size": 31,
        "hidden_size": 16,
        "n_positions": 32,
        "n_layer": 2,
        "n_head": 2,
        "num_labels": 3,
        "hidden_dropout_prob": 0.0,
    }
    torch.manual_seed(0)
    config = LeapformerConfig(pooling=pooling, attention=attention, **options | changes)
    return LeapformerForSequenceClassification(config).double().eval()


def make_ids(*shape, seed=0):
    return torch.randint(0, 31, shape, generator=torch.Generator().manual_seed(seed))


def pad(ids, side, n=5):
    """The ids with further ones at a side, and the mask that says so."""
    parts = [(ids, torch.ones_like(ids)), (make_ids(len(ids), n, seed=9), torch.zeros(len(ids), n))]
    parts = parts if side == "right" else parts[::-1]
    return tuple(torch.cat(part, dim=1).long() for part in zip(*parts, strict=True))


# Sizes


def test_the_text_model_of_long_range_arena_has_as_many_parameters_as_the_authors():
    counts = {
        name: LeapformerForSequenceClassification(
            LeapformerConfig(attention=name, **TEXT)
        ).num_parameters()
        for name in ("softmax", "leapformer")
    }
    assert counts == {"softmax": 370_562, "leapformer": 370_562 + 2_180}


def test_the_other_tasks_have_too():
    def count(**changes):
        config = LeapformerConfig(attention="softmax", **TEXT | changes)
        return LeapformerForSequenceClassification(config).num_parameters()

    assert count(vocab_size=32, n_positions=2048, num_labels=10) == 209_802
    assert count(two_inputs=True) == 395_138
    assert count(n_positions=1024) == 173_954
    assert count(vocab_size=256, n_positions=1024, num_labels=10) == 158_602


def test_the_classifier_is_twice_as_wide_as_the_model_unless_told():
    assert build().classifier[0].out_features == 32
    assert build(classifier_size=7).classifier[0].out_features == 7


# First weights


def assert_begins_as_in_torch(linear):
    bound = linear.in_features**-0.5
    for parameter in (linear.weight, linear.bias):
        assert parameter.abs().max() <= bound
        assert parameter.abs().max() > 0.8 * bound
    assert_close(linear.weight.std().item(), bound / 3**0.5, rtol=0.1, atol=0)


@pytest.mark.parametrize("attention", usable_as("bidirectional"))
def test_linear_layers_begin_as_in_torch_and_embeddings_small(attention):
    torch.manual_seed(0)
    model = LeapformerForSequenceClassification(
        LeapformerConfig(attention=attention, proportion_hidden=64, **TEXT | {"num_labels": 64})
    )
    for module in model.modules():
        # A net's last layer has too few weights to be told by.
        if isinstance(module, torch.nn.Linear) and module.out_features > 2:
            assert_begins_as_in_torch(module)
        elif isinstance(module, torch.nn.Embedding):
            assert_close(module.weight.std().item(), 0.02, rtol=0.1, atol=0)


def test_weights_that_are_loaded_are_kept_and_missing_ones_begin_anew(tmp_path):
    torch.manual_seed(0)
    model = LeapformerForSequenceClassification(LeapformerConfig(**TEXT))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    model.save_pretrained(tmp_path)
    loaded = LeapformerForSequenceClassification.from_pretrained(
        tmp_path, num_labels=64, ignore_mismatched_sizes=True
    )
    assert_begins_as_in_torch(loaded.classifier[2])
    for name, parameter in loaded.named_parameters():
        assert name.startswith("classifier.2") or (parameter == 7.0).all()


# Pooling


def test_the_mean_is_over_real_tokens():
    x = torch.randn(2, 4, 3, dtype=torch.double)
    real = torch.tensor([[True, True, True, True], [False, True, True, False]])
    assert_close(mean_of(x, real), torch.stack([x[0].mean(0), (x[1, 1] + x[1, 2]) / 2]))
    assert_close(mean_of(x), x.mean(1))
    assert_close(mean_of(x, torch.zeros_like(real)), torch.zeros(2, 3).double())


def test_the_mean_of_a_long_text_fits_half_precision_though_its_sum_does_not():
    x = torch.full((1, 40_000, 2), 3.0, dtype=torch.float16)
    real = torch.ones(1, 40_000, dtype=torch.bool)
    for mean in (mean_of(x), mean_of(x, real)):
        assert mean.dtype == torch.float16 and (mean == 3).all()


def test_the_last_is_the_last_real_token():
    x = torch.randn(3, 4, 3, dtype=torch.double)
    real = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0], [0, 0, 1, 1]]).bool()
    assert_close(last_of(x, real), torch.stack([x[0, 3], x[1, 2], x[2, 3]]))
    assert_close(last_of(x), x[:, 3])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("position", ["learned", "sinusoidal", "rotary"])
def test_pads_change_nothing(pooling, side, position):
    model, ids = build(pooling, position_embedding=position), make_ids(2, 9)
    padded, mask = pad(ids, side)
    assert_close(model(padded, attention_mask=mask).logits, model(ids).logits)


@pytest.mark.parametrize("attention", usable_as("bidirectional"))
@pytest.mark.parametrize("pooling", POOLINGS)
def test_pads_change_nothing_whichever_the_attention(attention, pooling):
    model, ids = build(pooling, attention), make_ids(2, 9)
    padded, mask = pad(ids, "right")
    assert_close(model(padded, attention_mask=mask).logits, model(ids).logits)


def test_no_id_is_taken_for_a_pad():
    model = build()
    ids = make_ids(1, 9)
    ids[0, 4:] = 0
    assert not torch.allclose(model(ids).logits, model(ids[:, :4]).logits)


def test_texts_of_a_batch_do_not_see_each_other():
    model = build()
    ids, mask = make_ids(2, 9), torch.ones(2, 9).long()
    mask[1, 4:] = 0
    together = model(ids, attention_mask=mask).logits
    assert_close(together[0], model(ids[:1]).logits[0])
    assert_close(together[1], model(ids[1:, :4]).logits[0])


@pytest.mark.parametrize("pooling", POOLINGS)
def test_every_token_matters(pooling):
    model, ids = build(pooling), make_ids(1, 8)
    before = model(ids).logits
    for i in range(8):
        edited = ids.clone()
        edited[0, i] = (edited[0, i] + 1) % 31
        assert not torch.allclose(model(edited).logits, before)


def test_cls_has_an_embedding_of_its_own_and_takes_no_position():
    model = build("cls")
    assert model.num_parameters() == build("mean").num_parameters() + 16
    assert model.model.embed_tokens.num_embeddings == 31
    assert model.cls.std() > 0.01

    before = model(make_ids(1, 8)).logits
    with torch.no_grad():
        model.cls.mul_(-1)
    assert not torch.allclose(model(make_ids(1, 8)).logits, before)


def test_attentions_count_from_cls_on():
    model, seen = build("cls", "cosformer"), []
    attention = model.model.layers[0].block.attention
    attention.register_forward_pre_hook(
        lambda _, args, options: seen.append(options["positions"].tolist()), with_kwargs=True
    )
    model(make_ids(2, 4), attention_mask=torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]))
    assert seen == [[[0, 1, 2, 3, 4], [0, 1, 1, 1, 2]]]  # Pads have any.


@pytest.mark.parametrize("attention", usable_as("bidirectional"))
def test_a_text_may_fill_all_positions_behind_cls(attention):
    assert build("cls", attention)(make_ids(1, 32)).logits.isfinite().all()


def test_a_text_longer_than_its_positions_is_an_error():
    with pytest.raises(InputError, match="position 32 is beyond the n_positions=32"):
        build()(make_ids(1, 33))


# Pairs


@pytest.mark.parametrize("pooling", POOLINGS)
def test_pairs_are_classified_by_both_texts_and_how_they_differ(pooling):
    model = build(pooling, two_inputs=True)
    a, b = make_ids(2, 9), make_ids(2, 6, seed=1)
    padded, mask = pad(b, "right")
    logits = model(a, input_ids_b=padded, attention_mask_b=mask).logits
    assert_close(logits, model(a, input_ids_b=b).logits)
    assert not torch.allclose(logits, model(b, input_ids_b=a).logits)

    seen = []
    model.classifier.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(a, input_ids_b=b)
    model(b, input_ids_b=a)
    (u, v, product, difference), (v2, u2, _, _) = (x.chunk(4, dim=-1) for x in seen)
    assert_close((u2, v2), (u, v))
    assert_close((product, difference), (u * v, u - v))


def test_a_second_text_is_for_models_that_take_two():
    with pytest.raises(InputError, match="input_ids_b is for models with two_inputs=True"):
        build()(make_ids(1, 4), input_ids_b=make_ids(1, 4))
    with pytest.raises(InputError, match="give input_ids_b: this model has two_inputs=True"):
        build(two_inputs=True)(make_ids(1, 4))


def test_packed_sequences_are_an_error():
    with pytest.raises(InputError, match=r"cu_seq_lens_q: a class is for a row, .* give rows"):
        build()(make_ids(1, 9), cu_seq_lens_q=torch.tensor([0, 4, 9]))


# Hugging Face


def test_the_loss_follows_the_problem():
    ids = make_ids(2, 5)
    model = build()
    out = model(ids, labels=torch.tensor([2, 0]))
    assert_close(out.loss, -(out.logits.log_softmax(-1)[[0, 1], [2, 0]]).mean())

    model = build(num_labels=1)
    target = torch.tensor([0.5, -1.0]).double()
    out = model(ids, labels=target)
    assert_close(out.loss, ((out.logits[:, 0] - target) ** 2).mean())

    model = build(problem_type="multi_label_classification")
    target = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]).double()
    out = model(ids, labels=target)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(out.logits, target)
    assert_close(out.loss, expected)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_saved_model_loads_by_the_auto_class(pooling, tmp_path):
    model = build(pooling, two_inputs=True, classifier_size=5)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype="auto").eval()
    assert isinstance(loaded, leap.LeapformerForSequenceClassification)
    ids = make_ids(2, 7)
    assert_close(loaded(ids, input_ids_b=ids).logits, model(ids, input_ids_b=ids).logits)


def test_hidden_states_tuples_and_embeddings_are_as_elsewhere():
    model, ids = build(), make_ids(2, 7)
    out = model(ids, output_hidden_states=True)
    assert len(out.hidden_states) == 3
    assert_close(model(ids, return_dict=False)[0], out.logits)
    embedded = model.get_input_embeddings()(ids)
    assert_close(model(inputs_embeds=embedded).logits, out.logits)


def test_gradient_checkpointing_changes_nothing():
    gradients = []
    for checkpointed in (False, True):
        model = build().train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        model(make_ids(2, 7), labels=torch.tensor([0, 1])).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert_close(*gradients)


@pytest.mark.filterwarnings("ignore:.*pin_memory")
def test_the_trainer_trains_it_in_whole_or_in_parts_alike(assert_parts_teach_as_a_whole):
    rows = [{"input_ids": ids, "labels": ids.sum() % 3} for ids in make_ids(12, 7)]
    assert_parts_teach_as_a_whole(lambda: build().float(), rows)


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pooling": "max"}, "pooling='max' is not known; there are mean, cls, last"),
        ({"classifier_size": 0}, "classifier_size=0 must be 1 or more"),
    ],
)
def test_settings_that_cannot_work_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        LeapformerConfig(**settings)
