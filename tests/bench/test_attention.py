from dataclasses import replace
from itertools import groupby

import pytest
import torch

from leap.bench import attention
from leap.bench.attention import BenchConfig, measure
from leap.bench.attention_report import describe
from leap.bench.mechanisms import mechanisms, missing_peers, peers
from leap.errors import ConfigError, LeapError
from leap.ops.backends import BACKENDS, Backend

TINY = BenchConfig(lengths=(32, 8), heads=2, width=16, windows=(4,), repeats=2, budget=0.05)


@pytest.fixture(scope="module")
def report():
    return measure(TINY)


def test_every_mechanism_is_measured_at_every_length_in_both_passes(report):
    names = [m.name for m in mechanisms(TINY.windows)]
    cases = [(r.length, r.passes, r.mechanism) for r in report.results]
    passes = ("forward", "forward+backward")
    assert cases == [(n, p, name) for n in (8, 32) for p in passes for name in names]
    for result in report.results:
        assert result.seconds == min(result.turns) > 0
        assert 1 <= len(result.turns) <= TINY.repeats
        assert result.peak_bytes >= 2 * result.length * 16 * 4  # The output: heads, width, bytes.


def test_speed_is_relative_to_the_baseline_at_the_same_length(report):
    taken = {(r.mechanism, r.length, r.passes): r.seconds for r in report.results}
    for r in report.results:
        assert r.speed == taken[r.baseline, r.length, r.passes] / r.seconds


def test_operations_are_those_of_the_products_in_chunks_of_64():
    linear, leapformer = (
        next(m for m in mechanisms() if m.name == name) for name in ("linear", "leapformer")
    )
    # A state of 16 x 16 added to and read; 65 / 2 tokens of a chunk met for scores and for values.
    assert linear.operations(10, 16, backward=False) == 2 * 10 * (2 * 256 + 65 * 16)
    assert leapformer.operations(10, 16, backward=False) == 2 * 10 * (4 * 256 + 65 * 16)
    assert linear.operations(10, 16, backward=True) == 2 * 10 * (7 * 256 + 7 * 520)


def test_a_whole_sequence_has_no_chunks_to_count():
    whole = next(m for m in mechanisms() if m.name == "leapformer-bidirectional")
    assert whole.operations(10, 16, backward=False) == 2 * 10 * 4 * 256
    assert whole.operations(10, 16, backward=True) == 2 * 10 * 12 * 256


def test_speed_is_told_beside_that_of_a_matrix_product(report):
    for r in report.results:
        assert r.sgemm > 0 and r.copy > 0
        if r.operations is None:
            assert r.of_sgemm is None
        else:
            assert r.of_sgemm == r.operations / r.seconds / r.sgemm
    assert {r.mechanism for r in report.results if r.operations} == {
        "leapformer",
        "cosformer",
        "linear",
        "linear-gated",
        "leapformer-bidirectional",
    }


def test_the_machine_is_described(report):
    assert report.machine["torch"] == torch.__version__
    assert report.machine["clock"] == "CPU time"
    assert report.machine["processor"]


def test_baselines_come_along_with_what_is_chosen():
    def names(*chosen):
        return [m.name for m in replace(TINY, mechanisms=chosen).chosen_mechanisms()]

    assert names("leap-w4") == ["softmax", "leap-w4"]
    both_ways = ["softmax-bidirectional", "leapformer-bidirectional"]
    assert names("leapformer-bidirectional") == both_ways
    assert names("softmax") == ["softmax"]


def test_mechanisms_take_turns(monkeypatch):
    called = []

    def watched(name):
        def attend(q, k, v):
            called.append(name)
            return v

        return attend

    entry = mechanisms()[0]
    entries = [replace(entry, name=name, attend=watched(name)) for name in ("softmax", "b", "c")]
    monkeypatch.setattr(attention, "mechanisms", lambda windows: entries)
    monkeypatch.setattr(attention, "check_definition", lambda mechanism, inputs: None)
    config = BenchConfig(lengths=(8,), mechanisms=("all",), repeats=3, budget=60.0)
    monkeypatch.setattr(attention, "PASSES", ("forward",))
    measure(config)
    order = "".join(name[0] for name, _ in groupby(called))
    assert order == "sbc" + "sbc" * config.repeats  # Memory, then turns of time.


def test_a_slow_mechanism_gets_fewer_turns_but_at_least_one():
    config = replace(TINY, lengths=(64,), mechanisms=("leap",), repeats=3)
    generous = measure(replace(config, budget=60.0)).results
    assert {len(r.turns) for r in generous} == {3}
    hasty = measure(replace(config, budget=1e-6)).results
    assert {len(r.turns) for r in hasty} == {1}


def test_nothing_is_measured_of_a_mechanism_that_is_wrong(monkeypatch):
    entries = mechanisms()
    wrong = replace(entries[0], name="wrong", attend=lambda q, k, v: q + k + v)
    monkeypatch.setattr(attention, "mechanisms", lambda windows: [*entries, wrong])
    with pytest.raises(LeapError, match="wrong disagrees with its definition"):
        measure(TINY)


def test_a_peer_that_is_wrong_is_left_out_and_said(monkeypatch):
    entry = mechanisms()[0]
    entries = [
        replace(entry, name="right"),
        replace(entry, name="wrong", attend=lambda q, k, v: q + k + v),
    ]
    monkeypatch.setattr(attention, "peers", lambda device, dtype: entries)
    report = measure(replace(TINY, lengths=(8,), mechanisms=("right", "wrong"), repeats=1))
    assert [r.mechanism for r in report.results[:2]] == ["softmax", "right"]
    assert {r.mechanism for r in report.results} == {"softmax", "right"}
    assert "Not measured: wrong disagrees with its definition" in describe(report)


def test_a_gpu_is_compared_with_the_kernels_that_others_have_for_it(monkeypatch):
    gpu, half = torch.device("cuda"), torch.bfloat16
    monkeypatch.setitem(BACKENDS, "fla", Backend("kernels"))
    theirs = ["linear-fla", "linear-gated-fla", "leapformer-fla"]
    assert [peer.name for peer in peers(gpu, half)] == ["softmax-flash", *theirs]
    assert [peer.name for peer in peers(gpu, torch.float32)] == theirs
    assert missing_peers(gpu, torch.float32) == ["softmax-flash (it takes float16 and bfloat16)"]
    monkeypatch.setitem(BACKENDS, "fla", Backend("kernels", missing=lambda: "not installed"))
    assert missing_peers(gpu, half) == ["fla (not installed)"]
    assert peers(torch.device("cpu"), half) == missing_peers(torch.device("cpu"), half) == []


def test_progress_runs_from_nothing_to_almost_all():
    seen = []
    config = replace(TINY, lengths=(8,), mechanisms=("leap-w4",))
    measure(config, seen.append)
    done = [status.step for status in seen]
    totals = {status.steps for status in seen}
    assert done == sorted(done) and done[0] == 0 and totals == {done[-1] + 1}
    assert any("8 tokens, forward: time of leap-w4" in status.doing for status in seen)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_other_precisions_can_be_measured(dtype):
    config = replace(TINY, lengths=(8,), mechanisms=("leapformer",), dtype=dtype, repeats=1)
    assert len(measure(config).results) == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": ()}, "nothing to measure"),
        ({"lengths": (256, 0)}, r"lengths=\(256, 0\) must be at least 1"),
        ({"windows": (-1,)}, r"windows=\(-1,\) must be at least 1"),
        ({"threads": 0}, "threads=0 must be at least 1"),
        ({"budget": 0.0}, "budget=0.0 must be more than 0"),
        (
            {"mechanisms": ("leapfromer",)},
            "'leapfromer'; there are softmax, .*leap-w4,",
        ),
        ({"device": "abacus"}, "device='abacus' cannot be measured"),
        ({"device": "meta"}, "device='meta' cannot be measured"),
        ({"device": "cuda:99"}, "no GPU 'cuda:99' is here: torch finds"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_work_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        BenchConfig(**settings)
