"""The cost of one more step of a stream, of text and of speech."""

import json

import pytest
import torch

from leap.bench.stream import (
    CACHE,
    OURS,
    REENCODE,
    WINDOW,
    Speech,
    StreamBenchConfig,
    Text,
    fill,
    read_on,
)
from leap.cli import main
from leap.errors import ConfigError
from leap.models import States

SIZES = {"hidden_size": 16, "heads": 2, "layers": 1, "vocabulary": 50}
SMALL = ["--hidden-size", "16", "--heads", "2", "--layers", "1", "--vocabulary", "50"]


def test_our_state_is_flat_and_softmax_keeps_everything(tmp_path, capsys):
    lengths = ["--lengths", "20", "60", "--sound", "2", "6", "--longest-reencoded", "30"]
    lengths += ["--cross-window", "10"]
    main(["bench", "stream", *SMALL, *lengths, "--repeats", "1", "--output", str(tmp_path)])
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    sizes = {(r["kind"], r["model"], r["length"]): r["state_bytes"] for r in results}
    for kind, short, long in (("text", 20, 60), ("speech", 2, 6)):
        assert sizes[kind, OURS, short] == sizes[kind, OURS, long]
        assert sizes[kind, WINDOW, short] == sizes[kind, WINDOW, long]
        assert sizes[kind, CACHE, long] > 2 * sizes[kind, CACHE, short]
        assert (kind, REENCODE, short) in sizes
        assert (kind, REENCODE, long) not in sizes
    for result in results:
        factor = result["seconds"] / 0.32 if result["kind"] == "speech" else None
        assert result["seconds"] > 0
        assert result["real_time_factor"] == (factor and pytest.approx(factor))
    assert "real-time factor" in capsys.readouterr().out
    assert (tmp_path / "stream.png").stat().st_size > 1000


@pytest.mark.parametrize("kind", [Text, Speech])
def test_keys_that_were_filled_in_are_as_many_as_reading_gives(kind):
    source = kind(StreamBenchConfig(**SIZES, lengths=(24,), sound=(2,)))
    model = source.model(CACHE)
    with torch.no_grad():
        read = read_on(model, source, States({}), 24)
        filled = fill(model, source, 24)
    assert filled.by_name.keys() == read.by_name.keys()
    assert filled.n_bytes == read.n_bytes
    for name in ("encoder-0", "cross-0", "self-0"):
        assert filled[name].k.shape == read[name].k.shape
        assert torch.equal(filled[name].length, read[name].length)


@pytest.mark.parametrize("kind", [Text, Speech])
def test_our_model_reads_a_step_of_states_for_each_piece_it_writes(kind):
    source = kind(StreamBenchConfig(**SIZES, lengths=(8,), sound=(1,)))
    states = read_on(source.model(OURS), source, States({}), 8)
    assert states["encoder-0"].length.item() == 8
    assert states["cross-0"].length.item() == 8
    assert states["self-0"].length.item() == 8 // source.states_per_step


def test_one_kind_of_source_can_be_left_out(tmp_path):
    lengths = ["--lengths", "--sound", "1", "--longest-reencoded", "1"]
    main(["bench", "stream", *SMALL, *lengths, "--repeats", "1", "--output", str(tmp_path)])
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert {r["kind"] for r in results} == {"speech"}


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="lengths"):
        StreamBenchConfig(lengths=(0,))
    with pytest.raises(ConfigError, match="lengths or sound"):
        StreamBenchConfig(lengths=(), sound=())
