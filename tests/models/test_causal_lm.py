"""Promises of the language models: one decoder, whichever attention it has."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, vmap
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    DynamicCache,
)

import leap
from leap.errors import FileError, InputError
from leap.models import LeapForCausalLM, LeapformerConfig, LeapformerForCausalLM, StateCache
from leap.models.cache import ROLLBACK_LIMIT


def make_ids(*shape, seed=0):
    return torch.randint(1, 61, shape, generator=torch.Generator().manual_seed(seed))


# Forward


def test_the_future_is_invisible(model):
    ids = make_ids(2, 20)
    edited = ids.clone()
    edited[:, 13:] = make_ids(2, 7, seed=1)
    before, after = model(ids).logits, model(edited).logits
    assert torch.equal(before[:, :13], after[:, :13])
    assert not torch.equal(before[:, 13:], after[:, 13:])


@pytest.mark.parametrize("side", ["left", "right"])
def test_pads_change_nothing_for_real_tokens(model, side):
    ids = make_ids(2, 12)
    pads = make_ids(2, 5, seed=1)
    parts = (pads, ids) if side == "left" else (ids, pads)
    masks = (torch.zeros_like(pads), torch.ones_like(ids))
    mask = torch.cat(masks if side == "left" else masks[::-1], dim=1)
    padded = model(torch.cat(parts, dim=1), attention_mask=mask).logits
    assert_close(padded[mask.bool()], model(ids).logits.flatten(0, 1))


def test_packed_sequences_are_as_apart(model):
    ids = make_ids(1, 20)
    packed = model(ids, cu_seq_lens_q=torch.tensor([0, 7, 8, 20])).logits
    apart = [model(part).logits for part in ids.split([7, 1, 12], dim=1)]
    assert_close(packed, torch.cat(apart, dim=1))


@pytest.mark.parametrize("kind", ["leapformer", "leap", "softmax"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_seq_idx": True, "return_position_ids": False},
        {"return_flash_attn_kwargs": True},
    ],
    ids=["position_ids", "seq_idx", "cu_seq_lens"],
)
def test_a_collator_that_packs_keeps_sequences_apart(kind, options, make_model):
    model = make_model(kind)
    parts = [part[0] for part in make_ids(1, 20).split([7, 1, 12], dim=1)]
    batch = DataCollatorWithFlattening(**options)([{"input_ids": part} for part in parts])
    apart = torch.cat([model(part[None]).logits for part in parts], dim=1)
    labels = batch.pop("labels")
    assert_close(model(**batch).logits, apart)
    expected = F.cross_entropy(apart[0, :-1], labels[0, 1:])
    assert_close(model(**batch, labels=labels).loss, expected)


def test_positions_that_go_on_by_one_pack_nothing(make_model):
    model = make_model("leapformer-none")
    ids, places = make_ids(1, 9), torch.arange(30, 39)
    out = model(ids, position_ids=places[None])
    assert_close(out.logits, model(ids).logits)
    assert out.past_key_values.layers[0].batch_size == 1


def test_one_token_at_a_time_as_all_at_once_pads_included(model):
    ids = make_ids(2, 8)
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[1, 4] = 0
    cache, logits = StateCache(model.config.n_layer), []
    for i in range(8):
        seen = {"attention_mask": mask[:, : i + 1], "past_key_values": cache}
        logits.append(model(ids[:, i : i + 1], **seen).logits)
    whole = model(ids, attention_mask=mask).logits
    assert_close(torch.cat(logits, dim=1)[mask.bool()], whole[mask.bool()])


@pytest.mark.parametrize("cut", [1, 7, 19])
def test_a_text_can_be_cut_anywhere(model, cut):
    ids = make_ids(2, 20)
    whole = model(ids).logits
    head = model(ids[:, :cut], use_cache=True)
    tail = model(ids[:, cut:], past_key_values=head.past_key_values)
    assert_close(torch.cat([head.logits, tail.logits], dim=1), whole)


def test_embeddings_may_be_given_instead_of_tokens(model):
    ids = make_ids(2, 9)
    embedded = model.get_input_embeddings()(ids)
    assert_close(model(inputs_embeds=embedded).logits, model(ids).logits)
    with pytest.raises(InputError, match="either input_ids or inputs_embeds"):
        model(ids, inputs_embeds=embedded)


def test_only_the_logits_asked_for_are_made(model):
    ids = make_ids(2, 9)
    every = model(ids).logits
    assert_close(model(ids, logits_to_keep=2).logits, every[:, -2:])
    picked = torch.tensor([0, 3])
    assert_close(model(ids, logits_to_keep=picked).logits, every[:, picked])


# Loss


def test_the_loss_is_that_of_the_shifted_logits(model):
    ids = make_ids(2, 20)
    labels = ids.clone()
    labels[0, :5] = -100
    expected = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    out = model(ids, labels=labels)
    assert out.logits is None
    assert_close(out.loss, expected)
    parameters = [p for p in model.parameters() if p.requires_grad]
    assert_close(
        torch.autograd.grad(out.loss, parameters, allow_unused=True),
        torch.autograd.grad(expected, parameters, allow_unused=True),
    )


def test_the_loss_honours_the_trainers_count_and_shifted_labels(make_model):
    model = make_model("leapformer")
    ids = make_ids(2, 20)
    shifted = F.pad(ids[:, 1:], (0, 1), value=-100)
    mean = model(ids, labels=ids).loss
    assert_close(model(ids, labels=ids, num_items_in_batch=2 * 38).loss, mean / 2)
    assert_close(model(ids, shift_labels=shifted).loss, mean)


def test_logits_come_with_the_loss_where_the_config_says_so(make_model):
    model = make_model("leapformer", loss_without_logits=False)
    assert model(make_ids(2, 9), labels=make_ids(2, 9)).logits.shape == (2, 9, 61)


# Generation


def test_with_a_cache_as_without(model, shapes_unchecked):
    ids = make_ids(2, 11)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    for extra in ({}, {"num_beams": 3}, {"prefill_chunk_size": 4}, {"prefill_chunk_size": 1}):
        cached = model.generate(ids, **options, **extra)
        if "prefill_chunk_size" in extra:
            extra = {}
        plain = model.generate(ids, use_cache=False, **options, **extra)
        assert torch.equal(cached, plain), extra


def test_sampling_with_a_cache_as_without(model, shapes_unchecked):
    ids = make_ids(2, 6)
    runs = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        runs.append(model.generate(ids, do_sample=True, max_new_tokens=12, use_cache=use_cache))
    assert torch.equal(*runs)


def test_generation_goes_on_from_a_returned_cache(model, shapes_unchecked):
    ids = make_ids(2, 6)
    whole = model.generate(ids, max_new_tokens=12, do_sample=False)
    first = model.generate(
        ids, max_new_tokens=5, do_sample=False, return_dict_in_generate=True, use_cache=True
    )
    rest = model.generate(
        first.sequences,
        attention_mask=torch.ones_like(first.sequences),  # A pad may be generated like any token.
        past_key_values=first.past_key_values,
        max_new_tokens=7,
        do_sample=False,
    )
    assert torch.equal(rest, whole)


def test_speculative_decoding_is_greedy_decoding(model, make_model, shapes_unchecked):
    ids = torch.cat([make_ids(1, 5)] * 4, dim=1)  # Repeats, so that looking up finds something.
    greedy = model.generate(ids, max_new_tokens=40, do_sample=False)
    looked_up = model.generate(ids, max_new_tokens=40, do_sample=False, prompt_lookup_num_tokens=5)
    assert torch.equal(looked_up, greedy)
    assistant = make_model("linear", seed=3)
    assisted = model.generate(ids, max_new_tokens=40, do_sample=False, assistant_model=assistant)
    assert torch.equal(assisted, greedy)


@pytest.mark.parametrize("kind", ["leapformer-none", "leap"])
def test_a_draft_may_be_longer_than_what_is_kept_otherwise(kind, make_model, shapes_unchecked):
    model, assistant = (make_model(kind, n_positions=1024, seed=seed) for seed in (0, 3))
    ids = torch.cat([make_ids(1, 160)] * 2, dim=1)
    greedy = model.generate(ids, max_new_tokens=3, do_sample=False)
    assistant.generation_config.num_assistant_tokens = 150
    assistant.generation_config.assistant_confidence_threshold = 0.0
    assert ROLLBACK_LIMIT < 150
    for drafts in ({"prompt_lookup_num_tokens": 150}, {"assistant_model": assistant}):
        drafted = model.generate(
            ids,
            max_new_tokens=200,
            do_sample=False,
            stopping_criteria=[lambda ids, _: torch.tensor([ids.shape[1] >= 323])],
            **drafts,
        )
        assert torch.equal(drafted[:, :323], greedy), drafts


def test_a_perfect_assistant_is_never_cropped_and_a_bad_one_always(
    model, make_model, shapes_unchecked
):
    """The state after many rejected drafts is the one that never saw them."""
    ids = make_ids(1, 6)
    caches = []
    for options in ({}, {"assistant_model": make_model("linear", seed=5)}):
        out = model.generate(
            ids,
            max_new_tokens=30,
            do_sample=False,
            return_dict_in_generate=True,
            past_key_values=StateCache(model.config.n_layer),
            **options,
        )
        last = model(
            out.sequences[:, out.past_key_values.get_seq_length() :],
            past_key_values=out.past_key_values,
        )
        caches.append(last.logits[:, -1])
    assert_close(*caches)


# The cache


def test_a_linear_cache_does_not_grow(make_model):
    for kind in ("leapformer", "leap", "leap-fastformer", "linear"):
        model = make_model(kind)
        sizes = {  # A window of 4 is full by then.
            model(make_ids(1, n), use_cache=True).past_key_values.n_bytes for n in (5, 50, 100)
        }
        assert len(sizes) == 1, kind


def test_a_saved_state_is_a_conversation_to_go_on_with(model, tmp_path):
    ids = make_ids(2, 20)
    expected = model(ids).logits[:, 13:]
    cache = model(ids[:, :13], use_cache=True).past_key_values
    model.save_state(tmp_path / "state.safetensors", cache)
    loaded = model.load_state(tmp_path / "state.safetensors")
    assert loaded.get_seq_length() == 13
    assert_close(model(ids[:, 13:], past_key_values=loaded).logits, expected)


def test_one_state_serves_many_rollouts(make_model):
    model = make_model("leapformer")
    prompt = make_ids(1, 10)
    cache = model(prompt[:, :-1], use_cache=True).past_key_values
    cache.batch_repeat_interleave(8)
    rollouts = model.generate(
        prompt.expand(8, -1), past_key_values=cache, do_sample=True, max_new_tokens=5
    )
    assert rollouts.shape == (8, 15)
    assert len({tuple(row.tolist()) for row in rollouts}) > 1


def test_a_state_of_another_model_is_named(tmp_path, make_model):
    path = tmp_path / "state.safetensors"
    small, large = make_model("leapformer"), make_model("leapformer", hidden_size=32)
    small.save_state(path, small(make_ids(1, 5), use_cache=True).past_key_values)
    for other in (large, make_model("leap"), make_model("hybrid")):
        with pytest.raises(
            FileError, match=r"state\.safetensors holds the state of another model; give"
        ):
            other.load_state(path)
    with pytest.raises(InputError, match="has read nothing yet"):
        small.save_state(path, StateCache(2))


def test_a_cache_of_another_kind_is_named(make_model, shapes_unchecked):
    with pytest.raises(InputError, match="DynamicCache; this model goes on from a StateCache"):
        make_model("leapformer")(make_ids(1, 5), past_key_values=DynamicCache())


# Length


def test_learned_positions_have_an_end_and_the_others_none(make_model):
    with pytest.raises(InputError, match=r"position 128 is beyond the n_positions=128"):
        make_model("leapformer-learned")(make_ids(1, 129))
    for kind in ("leapformer", "leapformer-rotary", "leapformer-none"):
        assert make_model(kind)(make_ids(1, 300)).logits.isfinite().all()


class Distant:
    """Positions on a device that one has to wait for, and how often they were looked at."""

    device = torch.device("cuda")

    def __init__(self, positions):
        self.positions, self.shape, self.looks = positions, positions.shape, 0

    def numel(self):
        return self.positions.numel()

    def max(self):
        self.looks += 1
        return self.positions.max()


def test_positions_on_a_gpu_are_looked_at_only_where_they_may_be_too_many(
    make_model, shapes_unchecked
):
    model = make_model("leapformer-learned")
    cache = model(make_ids(1, 120), use_cache=True).past_key_values
    near, padded, beyond = (Distant(torch.arange(n, n + 9)[None]) for n in (90, 110, 120))
    model.model._check_positions(near, None)
    assert near.looks == 0
    model.model._check_positions(padded, cache)  # Of the 120 tokens read, 10 were pads.
    assert padded.looks
    with pytest.raises(InputError, match=r"position 128 is beyond the n_positions=128"):
        model.model._check_positions(beyond, cache)


# Hugging Face


def test_saved_and_loaded_by_the_auto_classes(model, tmp_path):
    ids = make_ids(2, 9)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert type(loaded) is type(model)
    assert_close(loaded(ids).logits, model(ids).logits)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.attentions == model.config.attentions
    assert config.windows == model.config.windows
    base = AutoModel.from_pretrained(tmp_path, dtype="auto")
    assert_close(base(ids).last_hidden_state, model.model(ids).last_hidden_state)


def test_torch_func_gives_the_gradients_of_each_text_alone(model):
    weights, ids = dict(model.named_parameters()), make_ids(2, 70)

    def loss(weights, row):
        logits = functional_call(model, weights, (row[None],), {"use_cache": False}).logits
        return F.cross_entropy(logits[0, :-1], row[1:])

    grads = vmap(grad(loss), in_dims=(None, 0), randomness="same")(weights, ids)
    for i, row in enumerate(ids):
        alone = torch.autograd.grad(loss(weights, row), list(weights.values()), allow_unused=True)
        for name, expected in zip(weights, alone, strict=True):
            if expected is not None:
                assert_close(grads[name][i], expected, rtol=1e-4, atol=1e-6, msg=name)


def test_gradient_checkpointing_changes_no_gradient(model):
    ids = make_ids(2, 9)
    expected = torch.autograd.grad(model(ids, labels=ids).loss, model.lm_head.weight)
    model.gradient_checkpointing_enable()
    model.train()
    assert_close(torch.autograd.grad(model(ids, labels=ids).loss, model.lm_head.weight), expected)


@pytest.mark.parametrize("kind", ["leapformer", "leap", "leap-fastformer", "softmax"])
@pytest.mark.parametrize("n_read", [0, 6])
def test_gradient_checkpointing_goes_on_from_a_cache(kind, n_read, make_model):
    """Truncated back-propagation through time: read on from a past that is not trained again."""
    model = make_model(kind).train()
    ids = make_ids(2, 14)
    parameters = list(model.parameters())
    found = []
    for change in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        cache = StateCache(model.config.n_layer)
        if n_read:
            with torch.no_grad():
                model(ids[:, :n_read], past_key_values=cache)
        change()
        loss = model(ids[:, n_read:], labels=ids[:, n_read:], past_key_values=cache).loss
        found.append(torch.autograd.grad(loss, parameters, allow_unused=True))
        assert cache.get_seq_length() == 14
    assert_close(found[1], found[0])


@pytest.mark.parametrize("kind", ["leapformer", "leapformer-norm", "hybrid", "leap", "leap-elu"])
def test_bfloat16_stays_close_and_finite(kind, make_model):
    model = make_model(kind, scale=1).float()
    ids = make_ids(2, 100)
    expected = model(ids).logits
    actual = model.bfloat16()(ids).logits
    assert actual.dtype == torch.bfloat16
    assert (actual.float() - expected).abs().max() <= 0.1 * expected.abs().max()


def test_public_names_are_at_the_top():
    assert leap.LeapForCausalLM is LeapForCausalLM
    assert leap.LeapformerForCausalLM is LeapformerForCausalLM


@pytest.mark.parametrize("attention", ["leapformer", "leap", "softmax"])
def test_layers_begin_by_adding_little_to_the_residual_stream(attention):
    config = LeapformerConfig(
        vocab_size=10, hidden_size=64, n_layer=8, attention=attention, initializer_range=0.1
    )
    for layer in LeapformerForCausalLM(config).model.layers:
        block = layer.block
        assert_close(block.feed_forward[0].weight.std().item(), 0.1, rtol=0.1, atol=0)
        for last in (block.feed_forward[3], block.attention.o_proj):
            assert_close(last.weight.std().item(), 0.1 / 4, rtol=0.1, atol=0)


def test_proportions_begin_apart():
    config = LeapformerConfig(vocab_size=10, hidden_size=64, n_layer=2, proportion="learned")
    for layer in LeapformerForCausalLM(config).model.layers:
        x = torch.randn(1, 100, 64)
        p = layer.block.attention.q_proportion(layer.block.attention.split(x))
        assert p.std() > 0.02


def test_parameters_are_called_as_in_checkpoints_of_earlier_versions():
    model = LeapformerForCausalLM(
        LeapformerConfig(hidden_size=8, n_layer=1, n_head=2, vocab_size=9)
    )
    linear = [f"attention.{name}_proj" for name in "qkvo"]
    linear += ["attention.output_gate", "attention.gate.net.0", "attention.steps.net.0"]
    linear += ["attention_norm", "feed_forward_norm", "feed_forward.0", "feed_forward.3"]
    block = {f"{name}.{part}" for name in linear for part in ("weight", "bias")}
    block |= {"attention.convolution.weight", "attention.steps.log_frequency"}
    expected = {f"model.layers.0.block.{name}" for name in block}
    expected |= {"lm_head.weight", "model.embed_tokens.weight"}
    assert set(model.state_dict()) == expected | {"model.norm.weight", "model.norm.bias"}
