import json
from dataclasses import replace

import numpy as np
import pytest

from leap.errors import ConfigError, FileError
from leap.tasks.lra import cache, generate, text
from leap.tasks.lra.data import TASKS, load_task
from leap.tasks.lra.prepare import PrepareConfig, prepare, tasks_at_hand

SIZES = {"train": 8, "valid": 3, "test": 4}


@pytest.fixture(autouse=True)
def data_sets(tmp_path, monkeypatch):
    """A folder of data sets with 20 + 10 reviews, and nothing else."""
    folder = tmp_path / "sets"
    (folder / "imdb").mkdir(parents=True)
    for part, n in {"train": 20, "test": 10}.items():
        rows = [{"text": f"{part} {i} is a long review", "label": i % 2} for i in range(n)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "imdb" / f"{part}.jsonl").write_text(lines)
    monkeypatch.setenv("LEAP_DATA", str(folder))
    monkeypatch.setattr(generate, "CHUNK", 20)
    return folder


def make(tmp_path, task="listops", **settings):
    config = PrepareConfig(task=(task,), output=tmp_path / "out", workers=1, **settings)
    (prepared,) = prepare(config)
    return prepared


def words(dataset):
    return {bytes((item["input_ids"] - 1).tolist()).decode() for item in dataset}


@pytest.mark.parametrize("task", ["listops", "pathfinder"])
def test_what_is_generated_can_be_loaded(tmp_path, task):
    prepared = make(tmp_path, task, **SIZES)
    assert not prepared.found and prepared.folder == tmp_path / "out" / task
    for split, size in SIZES.items():
        dataset = load_task(task, tmp_path / "out", split)
        assert len(dataset) == size and dataset.info == TASKS[task]
        for item in dataset:
            assert item["input_ids"].max() < dataset.info.vocab_size
            assert item["input_ids"].min() >= (dataset.info.pad_id is not None)
            assert len(item["input_ids"]) <= dataset.info.max_length
            assert item["labels"] < dataset.info.n_classes


def test_levels_of_pathfinder_are_kept_apart(tmp_path):
    for difficulty in ("easy", "hard"):
        make(tmp_path, "pathfinder", difficulty=difficulty, **SIZES)
    easy, hard = (load_task(name, tmp_path / "out") for name in ("pathfinder-easy", "pathfinder"))
    assert easy.info.name == "pathfinder-easy"
    assert easy.examples.inputs.tokens.sum() < hard.examples.inputs.tokens.sum()


def test_levels_of_listops_are_of_different_lengths(tmp_path):
    for level, least, most in (("easy", 17, 127), ("intermediate", 129, 499), ("hard", 501, 1999)):
        make(tmp_path, "listops", difficulty=level, **SIZES)
        data = load_task("listops" if level == "hard" else f"listops-{level}", tmp_path / "out")
        assert least <= data.lengths.min() <= data.lengths.max() <= most <= data.info.max_length


def test_reviews_to_choose_by_are_held_out_of_those_to_train_on(tmp_path):
    make(tmp_path, "text")
    train, valid, test = (words(load_task("text", tmp_path / "out", s)) for s in cache.SPLITS)
    assert [len(train), len(valid), len(test)] == [18, 2, 10]
    assert not train & valid and all(word.startswith("train") for word in train | valid)
    assert all(word.startswith("test") for word in test)


def test_fewer_examples_and_shorter_ones_can_be_asked_for(tmp_path):
    facts = make(tmp_path, "text", max_length=10, **SIZES).facts
    assert {split: facts["splits"][split]["examples"] for split in SIZES} == SIZES
    # Those that are left out are not counted as cut.
    assert {split: facts["splits"][split]["cut"] for split in SIZES} == SIZES
    assert load_task("text", tmp_path / "out").info == replace(TASKS["text"], max_length=10)


def test_more_examples_than_there_are_cannot(tmp_path):
    with pytest.raises(ConfigError, match=r"test=11 examples were asked for, and there are 10"):
        make(tmp_path, "text", test=11)
    with pytest.raises(ConfigError, match=r"train=19 .* there are 18"):
        make(tmp_path, "text", train=19)
    with pytest.raises(ConfigError, match=r"valid=20 leaves nothing to train on: there are 20"):
        make(tmp_path, "text", valid=20)
    assert not (tmp_path / "out").exists()


def test_all_of_the_release_of_listops_is_read(tmp_path):
    source = tmp_path / "release" / "listops-1000"
    source.mkdir(parents=True)
    for name, n in {"train": 9, "val": 5, "test": 4}.items():
        (source / f"basic_{name}.tsv").write_text("Source\tTarget\n" + "( [MAX 2 ) ]\t2\n" * n)
    facts = make(tmp_path, source=tmp_path / "release").facts
    assert [split["examples"] for split in facts["splits"].values()] == [9, 5, 4]
    assert facts["settings"]["source"] == "release" and facts["settings"]["train"] is None


def test_what_is_there_already_is_kept(tmp_path, monkeypatch):
    make(tmp_path, "text")
    monkeypatch.setattr(text, "read", lambda *_: pytest.fail("read again"))
    assert make(tmp_path, "text").found


@pytest.mark.parametrize("change", [{"seed": 1}, {"test": 5}, {"max_length": 9}])
def test_what_was_made_with_other_settings_is_not_taken_for_these(tmp_path, change):
    make(tmp_path, "text")
    ((name, value),) = change.items()
    with pytest.raises(FileError, match=rf"out/text was made with {name}=.*, not {value}; give"):
        make(tmp_path, "text", **change)


def test_what_was_made_from_another_source_is_not_either(tmp_path, data_sets):
    make(tmp_path, "text")
    (data_sets / "imdb").rename(data_sets / "reviews")
    with pytest.raises(FileError, match=r"source=imdb, not reviews"):
        make(tmp_path, "text", source=data_sets / "reviews")


def test_what_was_damaged_is_noticed(tmp_path):
    path = make(tmp_path, "text").folder / "test.tokens.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(FileError, match=r"test\.tokens\.npy is not what was written"):
        make(tmp_path, "text")


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    path = tmp_path / "out/text/thesis.txt"
    path.parent.mkdir(parents=True)
    path.write_text("years of work")
    with pytest.raises(FileError, match=r"out/text holds something else"):
        make(tmp_path, "text")
    assert path.read_text() == "years of work"


def test_what_was_stopped_half_way_is_begun_anew(tmp_path, monkeypatch):
    save = np.save

    def stop(path, array):
        if "valid" in path.name:
            raise KeyboardInterrupt
        save(path, array)

    with monkeypatch.context() as patched:
        patched.setattr(np, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path, "text")
    assert not (tmp_path / "out/text").exists()
    assert not make(tmp_path, "text").found
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["text"]


def test_by_default_all_that_is_at_hand_is_made(data_sets):
    here, missing = tasks_at_hand()
    assert here == ["listops", "text", "pathfinder"]
    assert set(missing) == {"image", "retrieval", "retrieval-standin"}
    assert "wikitext-2" in missing["retrieval-standin"]
    (data_sets / "wikitext-2").mkdir()
    assert "retrieval-standin" in tasks_at_hand()[0]


def test_progress_is_told(tmp_path):
    told = []
    config = PrepareConfig(task=("listops",), output=tmp_path / "out", workers=1, **SIZES)
    list(prepare(config, lambda status: told.append((status.name, status.step, status.steps))))
    assert told[0] == ("listops", 0, 0) and told[-1] == ("listops", 15, 15)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": 0}, "train=0 must be 1 or more"),
        ({"workers": 0}, "workers=0 must be 1 or more"),
        ({"seed": -1}, "seed=-1 must be from 0 to 4294967295"),
        ({"source": "x"}, "a source is for one task"),
        ({"source": "x", "task": ("text", "image")}, "a source is for one task"),
        ({"source": "x", "task": ("pathfinder",)}, "pathfinder is generated"),
        ({"difficulty": "easy", "task": ("text",)}, "easy is for listops and pathfinder alone"),
        ({"difficulty": "easy", "task": ("listops",), "source": "x"}, "easy is generated"),
        ({"max_length": 9, "task": ("image",)}, "max_length=9 is for text and retrieval alone"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, settings, message):
    if "source" in settings:
        settings = settings | {"source": tmp_path}
    with pytest.raises(ConfigError, match=message):
        PrepareConfig(**settings)
