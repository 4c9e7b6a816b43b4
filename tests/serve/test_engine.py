"""Promises of the engine: everyone gets what they would get alone, and nobody harms another."""

import random
import threading
import time

import numpy as np
import pytest
import torch

from leap.errors import ConfigError
from leap.serve.engine import Busy, Done, Failed
from leap.serve.protocol import Kept
from leap.serve.text import Text

PROMPTS = ["", "Once upon", "a", "To be or not to be, that is the question. " * 4, "Björn"]
MIXED = [
    {"prompt": prompt, "max_tokens": n, **sampling}
    for prompt, n in zip(PROMPTS, (7, 1, 23, 12, 5), strict=True)
    for sampling in ({}, {"temperature": 0.9, "top_p": 0.8, "seed": n})
]


def alone(engine_of, ask, told, served):
    """What each gets from a server that has nobody else."""
    engine = engine_of(served, slots=1, block=10_000)
    return [told(ask(engine, **each)) for each in MIXED]


def test_everyone_gets_what_they_would_get_alone(served, engine_of, ask, told):
    expected = alone(engine_of, ask, told, served)
    engine = engine_of(served, slots=4, block=16, budget=40)
    chance = random.Random(0)
    order = chance.sample(range(len(MIXED)), len(MIXED))
    replies = {}
    for i in order:
        replies[i] = ask(engine, **MIXED[i])
        time.sleep(chance.choice((0, 0.01)))
    assert [told(replies[i]) for i in range(len(MIXED))] == expected


def test_rows_that_read_unlike_lengths_side_by_side_lose_nothing(served):
    """As two prompts do, of which one ends with a shorter piece than the other goes on with."""
    prompt, other, more = list(range(10, 25)), list(range(30, 38)), [40, 41]
    _, alone = served.read([prompt], served.empty())
    _, begun = served.read([prompt[:12]], served.empty())
    _, both = served.read([prompt[12:], other], served.join([begun, served.empty()]))
    for row, state in ((0, alone), (1, served.read([other], served.empty())[1])):
        kept = served.select(both, [row])
        if served.name == "gpt2":  # The pads among its places go.
            assert served.n_bytes(kept) == served.n_bytes(state)
        np.testing.assert_allclose(
            served.read([more], kept)[0], served.read([more], state)[0], rtol=1e-5
        )


def test_greedy_is_what_generate_writes(served, engine_of, ask, told):
    prompt = "Once upon"
    tokens = torch.tensor([[*served.begin(), *served.encode(prompt)]])
    mask = torch.ones_like(tokens)
    served.model.generation_config.eos_token_id = None
    found = served.model.generate(
        tokens, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0
    )
    expected = found[0, tokens.shape[1] :].tolist()
    _, reason, written = told(ask(engine_of(served), prompt, max_tokens=20))
    n = expected.index(served.end) + 1 if served.end in expected else 20
    assert (written, reason) == (expected[:n], "stop" if n < 20 else "length")


def test_a_text_goes_on_from_its_state_as_if_it_had_never_stopped(served, engine_of, ask, told):
    engine = engine_of(served)
    whole = told(ask(engine, "Once", max_tokens=20))[2]
    first = ask(engine, "Once", max_tokens=8)
    state = first.wait().state
    halves = [ask(engine, after=state, max_tokens=12) for _ in range(2)]  # Forked: gone on twice.
    for half in halves:
        assert first.job.written + told(half)[2] == whole
    more = ask(engine, " there", after=state, max_tokens=4)
    done = more.wait()
    assert engine.states.get(done.state).n_read == 1 + 4 + 8 + 6 + 3
    longer = "Once" + first.text
    if served.encode(longer) == served.encode("Once") + first.job.written:
        assert told(ask(engine, longer + " there", max_tokens=4))[2] == more.job.written


@pytest.mark.parametrize("kind", ["leapformer", "hybrid"])
def test_a_state_is_saved_and_loaded(kind, build, engine_of, ask, told, tmp_path):
    served = build(kind)
    engine = engine_of(served)
    done = ask(engine, "Once", max_tokens=5).wait()
    served.save(engine.states.get(done.state), tmp_path / "text")
    again = engine.keep(served.load(tmp_path / "text"))
    expected = told(ask(engine, after=done.state, max_tokens=6))
    assert told(ask(engine, after=again, max_tokens=6)) == expected


def test_a_key_value_cache_is_not_saved(build, tmp_path):
    with pytest.raises(ConfigError, match="gpt2 keeps all it has read, and no state to save"):
        build("gpt2").save(Kept(None, (), 0), tmp_path / "x")


def test_a_shared_prefix_is_read_once(build, engine_of, ask):
    served = build("leapformer")
    counted = Counted(served)
    engine = engine_of(counted, block=16, budget=64)
    shared = "x" * 100
    alone = [ask(engine_of(served, block=16), shared + end, max_tokens=3) for end in "abc"]
    first = ask(engine, shared + "a", max_tokens=3)
    assert first.wait().n_shared == 0
    before = counted.n_tokens
    others = [ask(engine, shared + end, max_tokens=3) for end in "bc"]
    assert [other.wait().n_shared for other in others] == [96, 96]
    assert counted.n_tokens - before <= 2 * (6 + 2)
    for one, other in zip(alone, [first, *others], strict=True):
        one.wait()
        assert one.job.written == other.job.written


def test_those_who_come_at_once_with_the_same_prompt_read_it_once(build, engine_of, ask, told):
    counted = Counted(build("leapformer"))
    engine = engine_of(counted, block=16, budget=64, prefix_bytes=0)
    replies = [ask(engine, "y" * 50, max_tokens=1, submit=False) for _ in range(5)]
    engine.submit(*[reply.job for reply in replies])
    assert len({told(reply)[0] for reply in replies}) == 1
    assert counted.n_tokens == 51


class Counted:
    """A model that counts the tokens it reads, and can be told to fail."""

    def __init__(self, served):
        self.served = served
        self.n_tokens = self.widest = 0
        self.fails_at = None
        self.gate = None

    def __getattr__(self, name):
        return getattr(self.served, name)

    def read(self, tokens, state):
        if self.gate is not None:
            self.gate.wait(60)
        if any(self.fails_at in row for row in tokens):
            raise RuntimeError("not enough memory: you tried to allocate")
        self.n_tokens += sum(map(len, tokens))
        self.widest = max(self.widest, len(tokens) * max(map(len, tokens)))
        return self.served.read(tokens, state)


def test_a_long_prompt_is_read_in_bounded_parts_beside_writing(build, engine_of, ask, told):
    counted = Counted(build("leapformer"))
    engine = engine_of(counted, block=8, budget=16)
    short = ask(engine, "a", max_tokens=40)
    long = ask(engine, "b" * 400, max_tokens=1)
    assert len(told(short)[2]) and len(told(long)[2]) == 1
    assert counted.widest <= 16


class Ascii(Counted):
    """A model that writes letters only."""

    def read(self, tokens, state):
        logits, state = super().read(tokens, state)
        masked = np.full_like(logits, -np.inf)
        masked[:, 97:123] = logits[:, 97:123]
        return masked, state


def test_a_stop_string_ends_a_text_before_it(build, engine_of, ask, told):
    engine = engine_of(Ascii(build("leap")))
    settings = {"max_tokens": 30, "temperature": 1.0, "seed": 1}
    whole, _, _ = told(ask(engine, "Once", **settings))
    assert len(whole) == 30
    stop = whole[14:17]
    text, reason, _ = told(ask(engine, "Once", stops=["Never", stop], **settings))
    assert (text, reason) == (whole[: whole.index(stop)], "stop")
    text, reason, _ = told(ask(engine, "Once", stops=[whole[-1] + "!!"], **settings))
    assert (text, reason) == (whole, "length")


def test_what_may_begin_a_stop_string_is_held_back():
    text = Text({0: "ab", 1: "c", 2: "x"}.__getitem__, ["bcd", "q"])
    assert text.push(0) == ("ab", "a", False)
    assert text.push(1) == ("c", "", False)
    assert text.push(2) == ("x", "bcx", False)
    assert (text.push(0)[1], text.finish(), text.finish()) == ("a", "b", "")


def test_one_who_leaves_frees_a_slot_and_those_who_wait_come_in(build, engine_of, ask, told):
    engine = engine_of(build("leapformer"), slots=1, waiting=1)
    first = ask(engine, "a", max_tokens=10**9)
    while not engine.n_running:
        time.sleep(0.001)
    second = ask(engine, "b", max_tokens=3)
    with pytest.raises(Busy, match="the queue is full; try again in"):
        ask(engine, "c")
    first.job.cancel()
    assert first.wait() == Done("cancelled", 2, 0, len(first.job.written), None)
    assert len(told(second)[2]) == 3
    assert (engine.n_running, engine.n_waiting, engine._state) == (0, 0, None)


def test_time_that_is_over_ends_a_text_and_fails_one_that_still_waits(build, engine_of, ask, told):
    engine = engine_of(build("leapformer"), slots=1)
    first = ask(engine, "a", max_tokens=10**9, seconds=0.3)
    second = ask(engine, "b", seconds=0.1)
    assert told(first)[1] == "length"
    failed = second.wait()
    assert isinstance(failed, Failed) and failed.is_late and "in time" in failed.message


def test_a_batch_that_fails_harms_nobody_after_it(build, engine_of, ask, told):
    counted = Counted(build("leapformer"))
    engine = engine_of(counted)
    expected = told(ask(engine, "ok", max_tokens=5))
    counted.fails_at = ord("#")
    failed = ask(engine, "#", max_tokens=5).wait()
    assert isinstance(failed, Failed) and "not enough memory" in failed.message
    assert told(ask(engine, "ok", max_tokens=5)) == expected
    assert engine.is_alive and engine.n_running == 0


def test_logits_that_are_no_numbers_fail_their_own_text_alone(build, engine_of, ask, told):
    served = build("leapformer")

    class Broken(Counted):
        def read(self, tokens, state):
            logits, state = super().read(tokens, state)
            logits = logits.copy()
            logits[[i for i, row in enumerate(tokens) if ord("#") in row]] = np.nan
            return logits, state

    engine = engine_of(Broken(served))
    replies = [ask(engine, p, max_tokens=4, submit=False) for p in ("ok", "#", "fine")]
    engine.submit(*[reply.job for reply in replies])
    assert "no finite numbers" in replies[1].wait().message
    assert [len(told(replies[i])[2]) for i in (0, 2)] == [4, 4]


def test_stopping_cancels_or_finishes_what_is_under_way(build, engine_of, ask, told):
    served = build("leapformer")
    engine = engine_of(served)
    reply = ask(engine, "a", max_tokens=30)
    engine.stop(finish=True)
    assert len(told(reply)[2]) == 30
    with pytest.raises(Busy):
        ask(engine, "b")
    engine = engine_of(served)
    reply = ask(engine, "a", max_tokens=10**9)
    engine.stop()
    assert reply.wait().reason == "cancelled" and not engine.is_alive


def test_a_state_that_was_evicted_is_told(build, engine_of, ask):
    served = build("leapformer")
    size = served.n_bytes(served.empty())
    engine = engine_of(served, state_bytes=int(2.5 * size))
    states = [ask(engine, "a", max_tokens=2).wait().state for _ in range(3)]
    assert [engine.states.get(state) is None for state in states] == [True, False, False]
    gone = ask(engine, "b", submit=False)
    gone.job.after = states[0]
    engine.submit(gone.job)
    assert "no longer kept" in gone.wait().message


def test_memory_per_user_stays_as_texts_grow(build, engine_of, ask, told):
    served = build("leapformer")
    engine = engine_of(served)
    sizes = {
        served.n_bytes(engine.states.get(ask(engine, "a" * n, max_tokens=2).wait().state).state)
        for n in (1, 50, 300)
    }
    assert len(sizes) == 1


def test_users_who_join_leave_and_break_off_at_random_lose_and_leak_nothing(
    build, engine_of, ask, told
):
    served = build("travelled")
    engine = engine_of(served, slots=6, waiting=100, block=16, budget=48)
    expected = {n: told(ask(engine, "z" * n, max_tokens=9, temperature=1.0, seed=n)) for n in
                range(1, 60, 7)}  # fmt: skip
    n_threads, faults = threading.active_count(), []

    def user(seed):
        chance = random.Random(seed)
        for _ in range(6):
            n = chance.choice(list(expected))
            reply = ask(engine, "z" * n, max_tokens=9, temperature=1.0, seed=n)
            if chance.random() < 0.3:
                time.sleep(chance.random() * 0.02)
                reply.job.cancel()
                reply.wait()
            elif told(reply) != expected[n]:
                faults.append(n)

    users = [threading.Thread(target=user, args=(seed,)) for seed in range(8)]
    for each in users:
        each.start()
    for each in users:
        each.join(120)
    assert not faults
    assert (engine.n_running, engine.n_waiting, engine._state) == (0, 0, None)
    assert threading.active_count() == n_threads
    assert engine.states.n_bytes <= engine.states.limit
