import json
from dataclasses import replace

import pytest

from leap.bench import serve, serve_report
from leap.bench.serve import ServeBenchConfig, measure
from leap.errors import ConfigError, LeapError

TINY = ServeBenchConfig(
    users=(3, 1), preset="tiny", prompts=(2, 20), replies=(2, 6), requests=7, soak=0.5
)


@pytest.fixture(scope="module")
def seen():
    return []


@pytest.fixture(scope="module")
def report(seen):
    return measure(TINY, seen.append)


def test_every_model_serves_every_number_of_users_together_and_one_at_a_time(report):
    cases = [(r.model, r.users, r.slots) for r in report.results]
    ways = [(1, 1), (3, 1), (3, 3)]
    assert cases == [(name, *way) for name in ("leapformer", "leap", "gpt2") for way in ways]
    assert len({(r.n_read, r.n_written) for r in report.results}) == 1
    for r in report.results:
        assert r.n_requests == 7 and r.seconds > 0
        assert 0 < r.first.p50 <= r.first.p95 <= r.first.p99 <= r.whole.p99


def test_users_get_what_they_get_alone(report):
    assert [r.n_equal for r in report.results] == [7] * 9


def test_memory_per_user_stays_where_a_key_value_cache_grows(report):
    longer = measure(replace(TINY, prompts=(60, 90), soak=0.0))
    sizes = {(r.model, r.slots): r.bytes_per_user for r in report.results}
    for r in longer.results:
        assert (r.bytes_per_user > 2 * sizes[r.model, r.slots]) == (r.model == "gpt2")


def test_a_soak_loses_and_leaks_nothing(report):
    soak = report.soak
    assert soak.n_replies > 0 and soak.n_broken_off > 0
    assert (soak.n_wrong, soak.n_failed, soak.n_left) == (0, 0, 0)
    assert len(soak.n_tensors) == len(soak.resident_mib) == 4


def test_a_soak_tells_replies_that_are_wrong(monkeypatch):
    monkeypatch.setattr(serve, "_answer", lambda engine, request: [])
    soaked = serve.soak(serve.serve_random("linear", TINY), "linear", TINY)
    assert soaked.n_wrong == soaked.n_replies > 0


def test_a_model_that_fails_is_told(monkeypatch):
    served = serve.serve_random("linear", TINY)
    monkeypatch.setattr(serve, "serve_random", lambda name, config: served)
    read = served.read

    def fail(tokens, state):
        if len(tokens[0]) == 1:
            raise RuntimeError("oh")
        return read(tokens, state)

    monkeypatch.setattr(served, "read", fail)
    with pytest.raises(LeapError, match="linear failed for 7 of 7 requests: the model could not"):
        measure(replace(TINY, models=("linear",), prompts=(2, 3), soak=0.0))


def test_progress_runs_from_nothing_to_almost_all(report, seen):
    done = [status.step for status in seen]
    assert done == list(range(10)) and {status.steps for status in seen} == {10}
    assert seen[1].doing == "leapformer: 3 users one at a time"


def test_files_are_written_and_say_how_it_was_measured(report, tmp_path):
    page = serve_report.page(report)
    paths = page.write(tmp_path)
    assert [path.name for path in paths] == ["results.json", "results.md", "serve.png"]
    stored = json.loads(paths[0].read_text())
    assert stored["config"]["users"] == [3, 1] and stored["soak"]["n_wrong"] == 0
    text = paths[1].read_text()
    assert "prompts of 2 to 20 tokens" in text and "a DynamicCache, rows padded" in text
    assert [table.title.partition(":")[0] for table in page.tables] == [
        "tokens written per second",
        "speed-up over one at a time",
        "latency",
        "memory per user of the fullest batch, KiB",
        "soak of 0.5 s, 3 users of leapformer",
    ]
    assert page.tables[0].rows[1][0] == "leapformer, one at a time"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"users": ()}, "nothing to measure"),
        ({"users": (0,)}, r"users=\(0,\) must be at least 1"),
        ({"prompts": (9, 3)}, r"prompts=\(9, 3\): give the fewest, then the most"),
        ({"models": ("gtp2",)}, "'gtp2'; there are leapformer, .*, gpt2"),
        ({"soak": -1.0}, "soak=-1.0 must be 0 seconds or more"),
        ({"preset": "huge"}, "no preset is called 'huge'"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_work_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        ServeBenchConfig(**settings)
