import gzip
import io
import os
import pickle
import struct
import tarfile

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from PIL import Image

from leap.errors import FileError
from leap.tasks.lra import image
from leap.tasks.lra.image import PIXELS, read, to_grey

NAMES = [*image.BATCHES["train"], *image.BATCHES["test"]]


@pytest.fixture
def batches(monkeypatch):
    """Colour planes and classes of six batches of four pictures, by name."""
    monkeypatch.setattr(image, "IN_A_BATCH", 4)
    chance = np.random.default_rng(0)
    return {
        name: (chance.integers(0, 256, (4, 3, PIXELS), np.uint8), chance.integers(0, 10, 4))
        for name in NAMES
    }


def write_binary(folder, batches):
    folder.mkdir(exist_ok=True)
    for name, (planes, labels) in batches.items():
        rows = np.concatenate([labels[:, None].astype(np.uint8), planes.reshape(4, -1)], axis=1)
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
    (folder / "batches.meta.txt").write_text("airplane\n")
    return folder


def python_2_pickle(planes, labels):
    """A batch as Python 2 and NumPy 1 wrote it, and as Python 3 no longer can."""

    def string(content):
        return b"T" + struct.pack("<i", len(content)) + content

    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85" + string(b"b")
    array += b"\x87R(K\1K\4M\0\x0c\x86cnumpy\ndtype\n" + string(b"u1") + b"K\0K\1\x87R"
    array += b"(K\3" + string(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    array += b"\x89" + string(planes.tobytes()) + b"tb"
    classes = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    entries = string(b"data") + array + string(b"labels") + classes
    return b"\x80\2}(" + entries + b"u."


def write_python(folder, batches):
    folder.mkdir(exist_ok=True)
    for name, (planes, labels) in batches.items():
        (folder / name).write_bytes(python_2_pickle(planes, labels))
    (folder / "batches.meta").write_bytes(b"never looked at")
    return folder


def pack(folder):
    path = folder.with_name(f"{folder.name}.tar.gz")
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, arcname="cifar")
    return path


@pytest.mark.parametrize("write", [write_binary, write_python])
@pytest.mark.parametrize("packed", [False, True], ids=["folder", "archive"])
def test_either_version_is_read_packed_or_not(tmp_path, batches, write, packed):
    folder = write(tmp_path / "cifar", batches)
    found = read(pack(folder) if packed else folder)
    for part, names in image.BATCHES.items():
        examples = found[part]
        planes = np.concatenate([batches[name][0] for name in names])
        assert_array_equal(examples.inputs.tokens.reshape(-1, PIXELS), to_grey(planes))
        assert_array_equal(examples.labels, np.concatenate([batches[name][1] for name in names]))
        assert (examples.inputs.lengths == PIXELS).all()


def test_the_datasets_library_gives_the_same(batches, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def rows(names):
        planes = np.concatenate([batches[name][0] for name in names])
        pictures = planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        labels = np.concatenate([batches[name][1] for name in names])
        return {"img": [Image.fromarray(picture) for picture in pictures], "label": labels.tolist()}

    columns = {part: rows(names) for part, names in image.BATCHES.items()}
    monkeypatch.setattr(datasets, "load_dataset", lambda name: {"uoft-cs/cifar10": columns}[name])
    planes = np.concatenate([batches[name][0] for name in image.BATCHES["train"]])
    found = read(None)
    assert_array_equal(found["train"].inputs.tokens.reshape(-1, PIXELS), to_grey(planes))
    assert found["test"].labels.tolist() == batches["test_batch"][1].tolist()


@pytest.mark.parametrize(
    ("colour", "shade"),
    [
        ((0, 0, 0), 0),
        ((255, 255, 255), 255),  # 254.97 of 255, and half a shade on top.
        ((255, 0, 0), 76),
        ((0, 255, 0), 149),
        ((0, 0, 255), 29),
        ((10, 20, 30), 18),
    ],
)
def test_grey_is_as_bright_as_its_colour_looks(colour, shade):
    planes = np.array(colour, np.uint8).reshape(1, 3, 1).repeat(PIXELS, axis=2)
    assert set(to_grey(planes).reshape(-1).tolist()) == {shade}


class Trap:
    def __reduce__(self):
        return os.system, ("touch trapped",)


@pytest.mark.parametrize("trap", [Trap(), {b"data": Trap(), b"labels": [0]}, np.save])
def test_a_pickle_that_would_run_something_does_not(tmp_path, batches, monkeypatch, trap):
    monkeypatch.chdir(tmp_path)
    folder = write_python(tmp_path / "cifar", batches)
    (folder / "data_batch_3").write_bytes(pickle.dumps(trap, protocol=2))
    with pytest.raises(FileError, match=r"data_batch_3 is broken or cut off: it asks for"):
        read(folder)
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x02}", pickle.dumps({b"data": [], b"labels": []})])
def test_a_pickle_without_pictures_is_named(tmp_path, batches, content):
    folder = write_python(tmp_path / "cifar", batches)
    (folder / "test_batch").write_bytes(content)
    with pytest.raises(FileError, match=r"test_batch is broken or cut off"):
        read(folder)


def test_a_batch_cut_off_or_missing_or_with_unknown_classes_is_named(tmp_path, batches):
    folder = write_binary(tmp_path / "cifar", batches)
    path = folder / "data_batch_2.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-3073])
    with pytest.raises(FileError, match=r"data_batch_2\.bin .* it has 9,219 of 12,292 bytes"):
        read(folder)
    path.write_bytes(b"\x0b" + content[1:])
    with pytest.raises(FileError, match=r"data_batch_2\.bin .* 4 pictures of ten classes"):
        read(folder)
    path.unlink()
    with pytest.raises(FileError, match=r"cifar holds no data_batch_2; give"):
        read(folder)


@pytest.mark.parametrize("keep", [0.5, 0.999])
def test_an_archive_cut_off_is_named(tmp_path, batches, keep):
    path = pack(write_binary(tmp_path / "cifar", batches))
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(FileError, match=r"cifar\.tar\.gz is broken or cut off"):
        read(path)


def test_what_is_no_archive_is_named(tmp_path):
    path = tmp_path / "cifar.tar.gz"
    for content in (b"<html>not found</html>", gzip.compress(b"text")):
        path.write_bytes(content)
        with pytest.raises(FileError, match=r"cifar\.tar\.gz is broken or cut off"):
            read(path)
    with pytest.raises(FileError, match=r"cannot read .*none\.tar\.gz"):
        read(tmp_path / "none.tar.gz")


def write_sheets(folder):
    pixels = np.arange(6 * PIXELS).astype(np.uint8).reshape(6, 32, 32)
    sheet = pixels.reshape(2, 3, 32, 32).swapaxes(1, 2).reshape(64, 96)
    for name in image.SAMPLE.values():
        Image.fromarray(sheet).save(folder / f"{name}.png")
        (folder / f"{name}.labels.txt").write_text("0\n9\n1\n2\n3\n4\n")
    return pixels


def test_the_sample_is_read_row_by_row(tmp_path):
    pixels = write_sheets(tmp_path)
    found = read(tmp_path)
    assert_array_equal(found["train"].inputs.tokens.reshape(6, 32, 32), pixels)
    assert found["test"].labels.tolist() == [0, 9, 1, 2, 3, 4]


def test_a_broken_sample_is_named(tmp_path):
    write_sheets(tmp_path)
    path = tmp_path / "test.labels.txt"
    path.write_text("0\n9\n")
    with pytest.raises(FileError, match=r"test\.labels\.txt .* 2 classes for 6 pictures"):
        read(tmp_path)
    path.write_text("0\n12\n")
    with pytest.raises(FileError, match=r"test\.labels\.txt .* no class"):
        read(tmp_path)
    path = tmp_path / "train_batch_1.png"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(FileError, match=r"train_batch_1\.png is broken or cut off"):
        read(tmp_path)
    path.write_bytes(io.BytesIO(b"no picture").read())
    with pytest.raises(FileError, match=r"train_batch_1\.png is broken or cut off"):
        read(tmp_path)


def test_the_grey_sample_of_cifar_is_whole(data):
    folder = data / "cifar10-gray-sample"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    found = read(folder)
    assert [len(part) for part in found.values()] == [10_000, 10_000]
    # The first classes of CIFAR-10, as known.
    assert found["train"].labels[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert found["test"].labels[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    assert np.bincount(found["test"].labels).tolist() == [1000] * 10
    # Whoever reads the tiles in the wrong order finds edges between neighbouring columns.
    rows = found["test"].inputs.tokens.reshape(-1, 32, 32).astype(int)
    assert np.abs(np.diff(rows, axis=1)).mean() < 20 and np.abs(np.diff(rows, axis=2)).mean() < 20
