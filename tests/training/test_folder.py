import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from leap.errors import FileError
from leap.training import RunFolder

SETTINGS = {"steps": 10, "data": "play.txt"}
DATA = {"text": "0123"}


def make(path, settings=SETTINGS):
    folder = RunFolder(path, settings)
    folder.create(DATA)
    return folder


def test_nothing_is_written_before_it_is_created(tmp_path):
    RunFolder(tmp_path / "run", SETTINGS)
    assert not (tmp_path / "run").exists()


def test_the_same_settings_find_it_again(tmp_path):
    make(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == SETTINGS
    make(tmp_path / "run")


def test_other_settings_are_refused(tmp_path):
    make(tmp_path / "run")
    with pytest.raises(FileError, match=r"run holds a run with steps=10, not 20; give another"):
        RunFolder(tmp_path / "run", SETTINGS | {"steps": 20})


def test_a_setting_that_an_older_run_did_not_have_is_no_difference(tmp_path):
    make(tmp_path / "run")
    RunFolder(tmp_path / "run", SETTINGS | {"colour": "red"})


def test_other_data_are_refused(tmp_path):
    folder = make(tmp_path / "run")
    with pytest.raises(FileError, match=r"data of the run in .* has changed"):
        folder.create({"text": "4567"})


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "letter.txt").write_text("Dear")
    with pytest.raises(FileError, match="is not empty and holds no run"):
        RunFolder(tmp_path, SETTINGS)
    with pytest.raises(FileError, match=r"letter\.txt is a file"):
        RunFolder(tmp_path / "letter.txt", SETTINGS)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_a_kill_while_it_is_made_leaves_one_that_can_go_on(tmp_path):
    (tmp_path / ".config.json.part").write_text("{")
    (tmp_path / "data.json").write_text(json.dumps(DATA))
    make(tmp_path)


def test_a_broken_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"steps"')
    with pytest.raises(FileError, match=r"config\.json is not a whole JSON file"):
        RunFolder(tmp_path, SETTINGS)


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot write to"):
        RunFolder(tmp_path / "file" / "run", SETTINGS).create(DATA)


def test_metrics_say_that_it_is_finished(tmp_path):
    folder = make(tmp_path / "run")
    assert folder.metrics() is None
    folder.write_metrics({"loss": 1.5})
    assert folder.metrics() == {"loss": 1.5}


def test_a_folder_inside_appears_whole_or_not_at_all(tmp_path):
    folder = make(tmp_path / "run")

    def fail(path):
        (path / "half").write_text("")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        folder.write_folder("model", fail)
    assert not folder.model.exists()

    folder.write_folder("model", lambda path: (path / "whole").write_text(""))
    assert [path.name for path in folder.model.iterdir()] == ["whole"]


def test_a_run_of_fewer_steps_is_gone_on_from_and_its_results_are_kept(tmp_path):
    make(tmp_path / "run").write_metrics({"loss": 1.5, "steps": 10})
    longer = SETTINGS | {"steps": 20}
    folder = RunFolder(tmp_path / "run", longer, lambda found: found["steps"] < 20)
    assert folder.metrics() is None
    assert make(tmp_path / "run").metrics() == {"loss": 1.5, "steps": 10}  # Not before it begins.
    folder.extend()
    assert RunFolder(tmp_path / "run", longer).metrics() is None
    assert json.loads((tmp_path / "run" / "metrics-10.json").read_text())["loss"] == 1.5
    with pytest.raises(FileError, match="steps=20, not 10"):
        RunFolder(tmp_path / "run", SETTINGS, lambda found: found["steps"] < 10)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"loss": 2, "time": None, "more": []}, None),
        ({"loss": "low"}, "'low' as 'loss'"),
        ({"loss": None}, "'None' as 'loss'"),
        ({"test": 3}, "'3' as 'test'"),
        ({"test": {}}, "no 'test.score'"),
        ({"history": [{"step": 1}, 7]}, "'7' as 'history'"),
        ({"history": [{"step": 1.5}]}, "'1.5' as 'history.step'"),
        ({"shares": {"a": "x"}}, "'x' as 'shares'"),
    ],
    ids=repr,
)
def test_results_that_were_changed_are_refused_by_name(tmp_path, changes, fault):
    like = {
        "loss": float,
        "time": float | None,
        "test": {"score": int},
        "history": [{"step": int}],
        "shares": [float],
    }
    good = {
        "loss": 1.5,
        "time": 1.0,
        "test": {"score": 1},
        "history": [{"step": 1}],
        "shares": {"a": 1},
    }
    folder = make(tmp_path)
    folder.write_metrics(good | changes)
    if fault is None:
        assert folder.metrics(like) == good | changes
    else:
        with pytest.raises(FileError, match=rf"metrics\.json has {fault}: it is of no run .*; rem"):
            folder.metrics(like)


def test_a_second_process_is_refused(tmp_path):
    make(tmp_path)
    code = (
        "import sys; from pathlib import Path; from leap.training import RunFolder\n"
        "with RunFolder(Path(sys.argv[1]), {}).alone(): print('in', flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with other:
        assert other.stdout.readline() == "in\n"
        message = rf"process {other.pid} on .* is at work in {tmp_path}; wait for it"
        with pytest.raises(FileError, match=message), RunFolder(tmp_path, SETTINGS).alone():
            pass
        other.kill()  # The lock of one that is killed holds nobody up.
    with RunFolder(tmp_path, SETTINGS).alone():
        pass


def test_weights_may_be_read_by_whoever_may_read_what_lies_beside_them(tmp_path):
    folder = make(tmp_path / "run")

    def write(path):
        save_file({"weight": torch.zeros(1)}, path / "model.safetensors")
        (path / "config.json").write_text("{}")

    folder.write_folder("model", write)
    usual = (tmp_path / "run" / "config.json").stat().st_mode
    assert {path.stat().st_mode for path in folder.model.iterdir()} == {usual}
