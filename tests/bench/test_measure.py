import time

import pytest
import torch

from leap.bench.measure import EventClock, clock_for, peak_bytes, seconds, threads

CPU = torch.device("cpu")
KIB = torch.empty(256)  # float32


def hold(n_kib):
    return torch.empty(n_kib * KIB.numel())


def test_peak_memory_is_the_most_held_at_once():
    def call():
        a = hold(100)
        b = hold(50)
        del a
        c = hold(120)  # The peak: b and c.
        del b, c
        hold(60)

    assert peak_bytes(call, CPU) == 170 * 1024


def test_peak_memory_leaves_out_what_was_held_before():
    held = hold(500)
    assert peak_bytes(lambda: held[: hold(200).numel()], CPU) == 200 * 1024


def test_peak_memory_counts_what_backward_takes():
    x = hold(64).fill_(1).requires_grad_()

    def call():
        y = x.exp()  # Kept for backward, where the gradient of its sum is expanded, not stored.
        torch.autograd.grad(y.sum(), x)

    assert peak_bytes(call, CPU) - 2 * 64 * 1024 < 1024


def test_peak_memory_is_the_same_every_time_and_prints_nothing(capfd):
    def call():
        torch.randn(64, 64) @ torch.randn(64, 64)

    assert len({peak_bytes(call, CPU) for _ in range(3)}) == 1
    assert capfd.readouterr() == ("", "")


def test_seconds_are_the_mean_of_the_calls():
    now = [0.0]

    def call():
        now[0] += 0.25

    assert seconds(call, lambda: now[0], n_calls=4) == pytest.approx(0.25)
    assert now[0] == 1.0


def test_one_thread_is_timed_without_what_others_take():
    name, clock = clock_for(CPU, 1)
    assert name == "CPU time"
    assert seconds(lambda: time.sleep(0.1), clock) < 0.05


def test_many_threads_are_timed_by_the_clock_on_the_wall():
    name, clock = clock_for(CPU, 2)
    assert name == "wall time"
    assert seconds(lambda: time.sleep(0.1), clock) > 0.05


class StandInEvent:
    """An event of a GPU that is not here: what is given to it takes its time until it is awaited.

    As of the real ones, differences are of milliseconds in float32.
    """

    given, done = 0.0, 0.0  # Milliseconds of work.

    def __init__(self, enable_timing):
        assert enable_timing
        self.at = None

    def record(self):
        self.at = type(self).given

    def synchronize(self):
        type(self).done = max(self.done, self.at)

    def elapsed_time(self, later):
        assert self.done >= later.at, "an event is compared before it has happened"
        return torch.tensor(later.at - self.at, dtype=torch.float32).item()


def test_a_gpu_is_timed_by_its_own_events_however_long_it_has_run(monkeypatch):
    clock = EventClock(StandInEvent)

    def call():
        StandInEvent.given += 0.0125  # Given, and not waited for.

    assert seconds(call, clock, n_calls=8) == pytest.approx(12.5e-6)
    StandInEvent.given += 3_600_000  # An hour, in which float32 no longer tells 0.2 ms apart.
    assert seconds(call, clock, n_calls=8) == pytest.approx(12.5e-6, rel=1e-5)
    monkeypatch.setattr(torch.cuda, "Event", StandInEvent)
    assert clock_for(torch.device("cuda"), 1)[0] == "GPU time"


def test_the_number_of_threads_is_put_back():
    before = torch.get_num_threads()
    with pytest.raises(KeyError), threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise KeyError
    assert torch.get_num_threads() == before
