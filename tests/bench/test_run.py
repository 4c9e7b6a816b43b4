from dataclasses import replace

import pytest

from leap.bench.run import Plan, Steps, Timed, TurnsConfig, plan, take_turns


class Abacus:
    """A clock that calls move on by themselves."""

    def __init__(self):
        self.now, self.called = 0.0, []

    def __call__(self):
        return self.now

    def call(self, name, *, first=1.0, later=1.0):
        def call():
            self.now += later if self.called[-1:] == [name] else first
            self.called.append(name)

        return call


def test_calls_take_turns_until_each_has_had_its_own():
    clock = Abacus()
    calls = {name: clock.call(name) for name in "ab"}
    plans = {"a": Plan(n_turns=3, n_calls=1), "b": Plan(n_turns=1, n_calls=2)}
    steps = Steps(lambda *_: None, total=2)
    turns = take_turns(calls, plans, clock, steps, "")
    assert "".join(clock.called) == "abbaa"
    assert turns["a"] == Timed(seconds=1.0, turns=(1.0, 1.0, 1.0))
    assert turns["b"].turns == (1.0,)
    assert steps.done == 2


@pytest.mark.parametrize(("warm_up", "taken"), [(False, 5.0), (True, 1.0)])
def test_a_warm_up_is_not_timed(warm_up, taken):
    clock = Abacus()
    calls = {name: clock.call(name, first=5.0) for name in "ab"}
    plans = dict.fromkeys(calls, Plan(n_turns=2, n_calls=1))
    turns = take_turns(calls, plans, clock, Steps(lambda *_: None, 2), "", warm_up=warm_up)
    assert set(turns["a"].turns + turns["b"].turns) == {taken}


def test_a_plan_fills_short_turns_and_keeps_to_the_budget():
    clock = Abacus()
    config = TurnsConfig(repeats=10, budget=0.05)
    short = plan(clock.call("short", first=0.004), clock, config)
    assert short == Plan(n_turns=4, n_calls=3)
    long = plan(clock.call("long", first=7.0), clock, config)
    assert long == Plan(n_turns=1, n_calls=1)
    assert plan(clock.call("x"), clock, replace(config, budget=9.0), first=2.0).n_turns == 4
