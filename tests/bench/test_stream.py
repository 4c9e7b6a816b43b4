"""The cost of one more word of a stream."""

import json

import pytest

from leap.bench.stream import CACHE, OURS, REENCODE, StreamBenchConfig
from leap.cli import main
from leap.errors import ConfigError

SMALL = ["--hidden-size", "16", "--heads", "2", "--layers", "1", "--vocabulary", "50"]


def test_our_state_is_flat_and_softmax_keeps_everything(tmp_path, capsys):
    lengths = ["--lengths", "20", "60", "--longest-reencoded", "20", "--repeats", "1"]
    main(["bench", "stream", *SMALL, *lengths, "--output", str(tmp_path)])
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    sizes = {(r["model"], r["length"]): r["state_bytes"] for r in results}
    assert sizes[OURS, 20] == sizes[OURS, 60]
    assert sizes[CACHE, 60] > 2 * sizes[CACHE, 20]
    assert (REENCODE, 20) in sizes and (REENCODE, 60) not in sizes
    assert all(r["seconds"] > 0 for r in results)
    assert "a word" in capsys.readouterr().out
    assert (tmp_path / "stream.png").stat().st_size > 1000


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="lengths"):
        StreamBenchConfig(lengths=(0,))
