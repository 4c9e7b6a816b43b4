import time

import pytest
import torch

from leap.bench.measure import clock_for, peak_bytes, seconds, threads

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


def test_the_number_of_threads_is_put_back():
    before = torch.get_num_threads()
    with pytest.raises(KeyError), threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise KeyError
    assert torch.get_num_threads() == before
