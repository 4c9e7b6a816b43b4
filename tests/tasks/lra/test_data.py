import json
import pickle

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from leap.errors import ConfigError, FileError
from leap.tasks.lra import cache
from leap.tasks.lra.cache import SPLITS, Examples, Sequences
from leap.tasks.lra.data import TASKS, Collator, load_task

TEXTS = [b"a long text", b"\0\xff", b"short"]
OTHERS = [b"b", b"an other text", b"cd"]


def make(folder, name, splits=None):
    info = TASKS[name]
    labels = np.array([1, 0, 1], np.uint8)
    if info.pad_id is None:
        pixels = np.arange(3 * info.max_length).astype(np.uint8).reshape(3, -1)
        examples = Examples(Sequences.rows(pixels), labels)
    else:
        pair = Sequences.join(OTHERS) if info.two_inputs else None
        examples = Examples(Sequences.join(TEXTS), labels, pair, cut=np.array([1, 0, 0], np.uint8))
    facts = {"task": vars(info)}
    cache.write(folder / name, dict.fromkeys(SPLITS, examples) | (splits or {}), facts)
    return folder


def test_bytes_are_ids_from_1_and_pads_are_masked(tmp_path):
    data = load_task("text", make(tmp_path, "text"), "train")
    assert len(data) == 3 and data.info == TASKS["text"]
    batch = Collator(data.info)([data[0], data[1]])
    assert batch["input_ids"].tolist() == [
        [byte + 1 for byte in TEXTS[0]],
        [1, 256] + [0] * (len(TEXTS[0]) - 2),
    ]
    assert_close(batch["attention_mask"], batch["input_ids"] != 0)
    assert batch["labels"].tolist() == [1, 0]


@pytest.mark.parametrize("multiple", [1, 4, 64])
def test_a_batch_can_be_filled_up_to_a_multiple(tmp_path, multiple):
    data = load_task("text", make(tmp_path, "text"), "test")
    batch = Collator(data.info, multiple)([data[2], data[0]])
    assert batch["input_ids"].shape[1] == -(-len(TEXTS[0]) // multiple) * multiple
    assert batch["attention_mask"].sum(-1).tolist() == [len(TEXTS[2]), len(TEXTS[0])]


def test_a_black_pixel_is_a_token_like_any_other(tmp_path):
    data = load_task("image", make(tmp_path, "image"), "valid")
    assert data.info.pad_id is None
    batch = Collator(data.info, multiple=64)([data[0], data[1]])
    assert set(batch) == {"input_ids", "labels"}
    assert_close(batch["input_ids"], torch.arange(2 * 1024).reshape(2, -1) % 256)


def test_a_pair_of_texts_makes_two_inputs_each_as_long_as_it_needs(tmp_path):
    data = load_task("retrieval", make(tmp_path, "retrieval"))
    assert data.info.two_inputs
    batch = Collator(data.info)([data[i] for i in range(3)])
    assert batch["input_ids"].shape[1] == len(TEXTS[0])
    assert batch["input_ids_b"].shape[1] == len(OTHERS[1])
    assert bytes((batch["input_ids_b"][1] - 1).tolist()) == OTHERS[1]
    assert batch["attention_mask_b"].sum(-1).tolist() == [len(text) for text in OTHERS]


def test_a_dataset_sent_to_another_process_opens_its_own_files(tmp_path):
    data = load_task("text", make(tmp_path, "text"))
    sent = pickle.dumps(data)
    assert len(sent) < 1000
    assert_close(pickle.loads(sent)[1], data[1])


def test_info_tells_counts_and_how_many_were_cut(tmp_path):
    facts = load_task("text", make(tmp_path, "text")).facts
    assert facts["splits"]["train"] == {
        "examples": 3,
        "of_each_class": [1, 2],
        "tokens": sum(map(len, TEXTS)),
        "shortest": 2,
        "longest": 11,
        "cut": 1,
    }


@pytest.mark.parametrize("name", ["train.tokens.npy", "train.offsets.npy", "valid.labels.npy"])
def test_a_shortened_file_is_named(tmp_path, name):
    path = make(tmp_path, "text") / "text" / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FileError, match=rf"{name} has .* bytes; remove .*text and make it again"):
        load_task("text", tmp_path)


def test_a_changed_byte_is_found_by_its_checksum(tmp_path):
    path = make(tmp_path, "text") / "text" / "test.tokens.npy"
    cache.verify(path.parent)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(FileError, match=r"test\.tokens\.npy is not what was written"):
        cache.verify(path.parent)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"files": 3}', '{"files": {}}'])
def test_a_broken_description_is_named(tmp_path, content):
    path = make(tmp_path, "text") / "text" / "info.json"
    path.write_text(content)
    with pytest.raises(FileError, match=r"info\.json"):
        load_task("text", tmp_path)


def test_a_folder_never_appears_before_it_is_whole(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "write_json", stop)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, "text")
    with pytest.raises(FileError, match=r"no text data in .*leap lra prepare --task text"):
        load_task("text", tmp_path)
    monkeypatch.undo()
    assert len(load_task("text", make(tmp_path, "text"))) == 3


def test_what_is_there_no_longer_is_replaced_as_a_whole(tmp_path):
    make(tmp_path, "retrieval")
    cache.write(tmp_path / "retrieval", {}, {"task": {}})
    assert [path.name for path in (tmp_path / "retrieval").iterdir()] == ["info.json"]
    assert json.loads((tmp_path / "retrieval/info.json").read_text())["files"] == {}


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"task='texts' .* listops, listops-inter"):
        load_task("texts", tmp_path)
    with pytest.raises(ConfigError, match=r"split='dev' .* train, valid, test"):
        load_task("text", tmp_path, "dev")
    with pytest.raises(FileError, match=r"prepare --task pathfinder --difficulty easy --output"):
        load_task("pathfinder-easy", tmp_path)
    with pytest.raises(FileError, match=r"prepare --task retrieval-standin --output"):
        load_task("retrieval-standin", tmp_path)
    with pytest.raises(ConfigError, match=r"multiple=0 must be 1"):
        Collator(TASKS["text"], multiple=0)
    with pytest.raises(ConfigError, match=r"multiple=100 does not divide the 1024 tokens of image"):
        Collator(TASKS["image"], multiple=100)
