"""Promises of the cache: rows that join and leave get what they would get alone."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from leap.errors import InputError
from leap.models import StateCache


def make_ids(*shape, seed=0):
    return torch.randint(1, 61, shape, generator=torch.Generator().manual_seed(seed))


def read(model, rows, cache):
    """Logits after the last token of each row, rows of fewer tokens padded on the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    output = model(
        ids, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1
    )
    return output.logits[:, -1]


def begin(model):
    """A cache of one row that has read nothing."""
    cache = StateCache(model.config.n_layer)
    model(torch.zeros(1, 0, dtype=torch.long), past_key_values=cache)
    return cache


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@torch.no_grad()
def test_rows_that_join_and_leave_at_random_get_what_they_get_alone(model, data):
    texts, cache = [], None
    for _ in range(data.draw(st.integers(2, 7), label="rounds")):
        new = data.draw(st.lists(st.integers(0, 6), max_size=3), label="lengths of those who join")
        parts = [] if cache is None else [cache]
        for length in new:
            alone = begin(model)
            text = make_ids(1, length, seed=len(texts) + 7 * length)
            if length:
                model(text, past_key_values=alone, use_cache=True)
            texts.append(text[0].tolist())
            parts.append(alone)
        if not parts:
            continue
        cache = StateCache.join(parts)
        kept = data.draw(
            st.lists(st.sampled_from(range(len(texts))), min_size=1, max_size=4, unique=True),
            label="those who stay",
        )
        texts, cache = [texts[i] for i in kept], cache.select(kept)
        sizes = data.draw(
            st.one_of(
                st.just([1] * len(texts)),
                st.lists(st.integers(1, 5), min_size=len(texts), max_size=len(texts)),
            ),
            label="tokens that each reads",
        )
        more = [make_ids(n, seed=n + len(x)).tolist() for n, x in zip(sizes, texts, strict=True)]
        texts = [x + y for x, y in zip(texts, more, strict=True)]
        logits = read(model, more, cache)
        assert cache.lengths.tolist() == [len(text) for text in texts]
        for text, row in zip(texts, logits, strict=True):
            assert_close(row, model(torch.tensor([text])).logits[0, -1])


@torch.no_grad()
def test_joined_rows_write_what_each_writes_alone(model):
    prompts = [make_ids(1, n, seed=n) for n in (3, 11, 6)]
    caches, last, expected = [], [], []
    for prompt in prompts:
        expected.append(model.generate(prompt, max_new_tokens=12, do_sample=False)[0, -12:])
        caches.append(StateCache(model.config.n_layer))
        logits = model(prompt, past_key_values=caches[-1], use_cache=True).logits
        last.append(logits[:, -1].argmax(-1))
    cache, tokens = StateCache.join(caches), [torch.cat(last)]
    while len(tokens) < 12:
        logits = model(tokens[-1][:, None], past_key_values=cache, use_cache=True).logits
        tokens.append(logits[:, -1].argmax(-1))
    assert torch.equal(torch.stack(tokens, dim=1), torch.stack(expected))


@torch.no_grad()
def test_a_join_leaves_its_parts_as_they_were_and_a_saved_row_goes_on(make_model, tmp_path):
    model = make_model("hybrid")
    caches = [StateCache(3), StateCache(3)]
    for cache, n in zip(caches, (4, 9), strict=True):
        model(make_ids(1, n), past_key_values=cache, use_cache=True)
    joined = StateCache.join(caches)
    assert [cache.get_seq_length() for cache in (*caches, joined)] == [4, 9, 9]
    row = joined.select([0])
    assert (row.get_seq_length(), row.layers[0].batch_size) == (4, 1)
    row.save(tmp_path / "row.safetensors")
    again = model.load_state(tmp_path / "row.safetensors")
    token = make_ids(1, 1, seed=3)
    expected = model(token, past_key_values=caches[0], use_cache=True).logits
    assert_close(model(token, past_key_values=again, use_cache=True).logits, expected)
    row.batch_repeat_interleave(2)
    assert row.lengths.tolist() == [4, 4] == row.layers[0].n_tokens.tolist()


@torch.no_grad()
def test_a_joined_row_beyond_learned_positions_is_refused_and_the_others_are_not(make_model):
    model = make_model("leapformer-learned", n_positions=8)
    caches = [StateCache(2), StateCache(2)]
    for cache, n in zip(caches, (3, 8), strict=True):
        model(make_ids(1, n), past_key_values=cache, use_cache=True)
    joined = StateCache.join(caches)
    with pytest.raises(InputError, match="position 8 is beyond the n_positions=8"):
        model(make_ids(2, 1), past_key_values=joined, use_cache=True)
    assert model(make_ids(1, 1), past_key_values=joined.select([0]), use_cache=True).logits.ndim


@torch.no_grad()
def test_caches_of_different_models_do_not_join(make_model):
    def cache_of(kind, **changes):
        model = make_model(kind, **changes)
        cache = StateCache(model.config.n_layer)
        model(make_ids(1, 3), past_key_values=cache, use_cache=True)
        return cache

    mine = cache_of("linear")
    with pytest.raises(InputError, match="more and fewer layers"):
        StateCache.join([mine, cache_of("hybrid")])
    with pytest.raises(InputError, match=r"LinearState .* and SoftmaxState"):
        StateCache.join([mine, cache_of("softmax")])
    with pytest.raises(InputError, match="of one model"):
        StateCache.join([mine, cache_of("leapformer", hidden_size=32)])
    for nothing in ([], [mine, StateCache(2)]):
        with pytest.raises(InputError, match="that have read something"):
            StateCache.join(nothing)
