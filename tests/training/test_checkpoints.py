import json
import random
import shutil

import pytest

from leap.errors import FileError
from leap.training.checkpoints import MANIFEST, Checkpoints


def make(path, *steps):
    checkpoints = Checkpoints(path / "checkpoints")
    for step in steps:
        checkpoints.begin(step)
        (checkpoints.at(step) / "weights").write_bytes(random.Random(step).randbytes(100))
        (checkpoints.at(step) / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        checkpoints.seal(step)
    return checkpoints


def flip_a_byte(path):
    content = bytearray((path / "weights").read_bytes())
    content[50] ^= 1
    (path / "weights").write_bytes(content)


def cut(path):
    (path / "weights").write_bytes((path / "weights").read_bytes()[:50])


DAMAGES = {
    "weights has changed": flip_a_byte,
    "weights has changed since": cut,
    "weights is missing": lambda path: (path / "weights").unlink(),
    "trainer_state.json is missing": lambda path: (path / "trainer_state.json").unlink(),
    "it has no manifest.json": lambda path: (path / MANIFEST).unlink(),
    "manifest.json cannot be read": lambda path: (path / MANIFEST).write_text('{"files"'),
    "manifest.json cannot be read (": lambda path: (path / MANIFEST).write_text('{"files": 3}'),
    "other.bin was not written with it": lambda path: (path / "other.bin").write_text("x"),
}


def test_whole_ones_are_known_and_the_newest_is_found(tmp_path):
    checkpoints = make(tmp_path, 5, 100, 20)
    assert checkpoints.steps() == checkpoints.whole() == [5, 20, 100]
    assert checkpoints.newest() == 100
    assert Checkpoints(tmp_path / "nowhere").newest() is None


@pytest.mark.parametrize("fault", DAMAGES)
def test_a_damaged_one_is_passed_over_and_told_of(tmp_path, fault):
    checkpoints = make(tmp_path, 5, 10, 20)
    DAMAGES[fault](checkpoints.at(20))
    told = []
    assert checkpoints.newest(told.append) == 10
    assert len(told) == 1 and "\n" not in told[0]
    assert told[0].startswith(f"{checkpoints.at(20)} is passed over for checkpoint-10: {fault}")
    assert checkpoints.steps() == [5, 10]


@pytest.mark.parametrize("fault", DAMAGES)
def test_if_all_are_damaged_that_is_an_error_and_nothing_is_removed(tmp_path, fault):
    checkpoints = make(tmp_path, 5, 10)
    for step in (5, 10):
        DAMAGES[fault](checkpoints.at(step))
    with pytest.raises(FileError, match=r"no checkpoint in .* is whole \(checkpoint-10: "):
        checkpoints.newest()
    assert checkpoints.steps() == [5, 10]


def test_one_that_a_kill_left_unfinished_is_removed_without_a_word(tmp_path):
    checkpoints = make(tmp_path, 5)
    checkpoints.begin(10)
    (checkpoints.at(10) / "weights").write_text("half")
    checkpoints.at(20).mkdir()
    told = []
    assert checkpoints.newest(told.append) == 5
    assert (told, checkpoints.steps()) == ([], [5])
    shutil.rmtree(checkpoints.at(5))
    checkpoints.begin(5)
    assert checkpoints.newest() is None


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    checkpoints = make(tmp_path, 5, 10, 15, 20)
    checkpoints.rotate(2, best=5)
    assert checkpoints.steps() == [5, 15, 20]
    checkpoints.rotate(1, best=None)
    assert checkpoints.steps() == [20]
