import numpy as np
import pytest
from numpy.testing import assert_array_equal

from leap.tasks.lra import pathfinder
from leap.tasks.lra.image import read_sheet
from leap.tasks.lra.pathfinder import FRAME, PADDLES, SIDE, WIDE, make_examples

INK = 32
"""Fainter pixels are ripples that making a picture smaller leaves around a line."""


def make(count, difficulty="hard", seed=0):
    examples = make_examples(count, np.random.default_rng(seed), difficulty)
    return examples.inputs.tokens.reshape(count, SIDE, SIDE), examples.labels


@pytest.fixture(scope="module")
def ours():
    return make(2000)


@pytest.fixture
def theirs(data):
    folder = data / "pathfinder32-sample"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    labels = np.array((folder / "labels.txt").read_text().split(), int)
    return read_sheet(folder / "images.png").reshape(-1, SIDE, SIDE), labels


def pieces(images):
    """Sizes of the connected pieces of ink, in all pictures."""
    inked = np.pad(images >= INK, ((0, 0), (1, 1), (1, 1)))
    names = np.arange(1, inked.size + 1).reshape(inked.shape) * inked
    while True:
        largest = names
        for axis in (1, 2):
            sides = (np.roll(largest, step, axis) for step in (-1, 1))
            largest = np.maximum(largest, np.maximum(*sides))
        largest = largest * inked
        if (largest == names).all():
            return np.unique(names[inked], return_counts=True)[1]
        names = largest


def histogram(images):
    return np.bincount(images.reshape(-1), minlength=256) / images.size


def distance(a, b):
    """Kolmogorov and Smirnov's: the most that two distribution functions differ by."""
    a, b = np.sort(a), np.sort(b)
    points = np.union1d(a, b)
    at = (np.searchsorted(x, points, side="right") / len(x) for x in (a, b))
    return np.abs(np.subtract(*at)).max()


def test_shades_are_those_of_the_sample(ours, theirs):
    # The share of pixels that would have to change; between pictures of other seeds it is 0.005.
    assert np.abs(histogram(ours[0]) - histogram(theirs[0])).sum() / 2 < 0.009


def test_there_is_as_much_ink_as_in_the_sample(ours, theirs):
    ink = [(images >= INK).sum(axis=(1, 2)) for images, _ in (ours, theirs)]
    assert abs(ink[0].mean() - ink[1].mean()) < 2
    # Two samples of one distribution differ by more than this once in a thousand times.
    assert distance(*ink) < 0.075


def test_curves_are_as_long_as_in_the_sample(ours, theirs):
    ours = ours[0][:1000], None
    found = [pieces(images) for images, _ in (ours, theirs)]
    n_pieces = [
        len(sizes) / len(images) for sizes, (images, _) in zip(found, (ours, theirs), strict=True)
    ]
    assert abs(n_pieces[0] / n_pieces[1] - 1) < 0.02
    assert distance(*found) < 0.02


def test_curves_lie_where_they_do_in_the_sample(ours, theirs):
    (our_images, _), (their_images, _) = ours, theirs
    noise = our_images.var(axis=0) * (1 / len(our_images) + 1 / len(their_images))
    differences = our_images.mean(axis=0) - their_images.mean(axis=0)
    # 1 where only chance is at work; 2 if just the rounding at the left edge is left out.
    assert np.mean(differences**2 / (noise + 1e-6)) < 1.3


def test_classes_are_equally_likely(ours, theirs):
    for _, labels in (ours, theirs):
        assert set(labels.tolist()) == {0, 1}
        assert abs(labels.mean() - 0.5) < 0.05


def test_a_picture_ranges_from_black_to_white(ours):
    images, _ = ours
    assert images.dtype == np.uint8
    assert (images.min(axis=(1, 2)) == 0).all() and (images.max(axis=(1, 2)) == 255).all()


@pytest.mark.parametrize("label", [0, 1])
def test_dots_lie_on_one_curve_or_on_two_as_the_class_says(label):
    # Two straight rows of paddles, the upper and the lower, and nothing else.
    rows, columns = np.array([8, 24]), np.arange(4, 28, 4)
    places = (rows[:, None] + FRAME) * WIDE + columns + FRAME
    n = 40
    curves = pathfinder._Curves(
        np.repeat(places[None], n, axis=0),
        np.full((n, 2, 6), 180),
        np.zeros((n, WIDE * WIDE), np.uint8),
    )
    none = np.full((n, 1, 2), -1)
    images, labels = pathfinder._draw(curves, (none, none), np.random.default_rng(0))
    images = images.reshape(n, SIDE, SIDE)[labels == label]
    assert len(images) > 10
    # A dot is wider than a paddle: it has ink above and below its middle.
    dotted = np.minimum(images[:, rows - 1], images[:, rows + 1]) >= INK
    starts, ends = dotted[:, :, columns[0]], dotted[:, :, columns[-1]]
    assert (starts.sum(axis=1) == 1).all() and (ends.sum(axis=1) == 1).all()
    assert ((starts & ends).any(axis=1) == bool(label)).all()
    assert 0 < starts[:, 0].mean() < 1
    assert not dotted[:, :, columns[1:-1]].any()


def test_the_starts_of_two_curves_are_near_the_middle_and_seven_pixels_apart():
    curves = pathfinder._grow_pairs(1000, 6, np.random.default_rng(0))
    y, x = np.divmod(curves.places[:, :, 0], WIDE)
    first = np.stack([y[:, 0], x[:, 0]]) - FRAME
    assert first.min() >= 10 and first.max() <= SIDE - 10
    assert np.abs(np.hypot(*(part[:, 1] - part[:, 0] for part in (y, x))) - 7).max() < 1


@pytest.mark.parametrize("difficulty", PADDLES)
def test_no_curve_has_a_gap_or_a_sharp_turn(difficulty):
    n_paddles = PADDLES[difficulty]
    curves = pathfinder._grow_pairs(2000, n_paddles, np.random.default_rng(0))
    assert curves.places.shape[1:] == (2, n_paddles) and len(curves) > 20
    y, x = np.divmod(curves.places[:, :, 1:], WIDE)
    assert min(y.min(), x.min()) >= FRAME + 2 and max(y.max(), x.max()) < FRAME + SIDE - 2
    steps = np.stack([np.diff(y), np.diff(x)])
    lengths = np.hypot(*steps)
    assert lengths.min() > 1 and lengths.max() < 8
    turned = (steps[..., 1:] * steps[..., :-1]).sum(axis=0)
    assert (turned >= 0).mean() > 0.9


def test_harder_levels_have_longer_curves_and_more_ink():
    ink = [(make(200, level)[0] >= INK).sum(axis=(1, 2)).mean() for level in PADDLES]
    assert ink == sorted(ink) and ink[-1] > ink[0] + 20


def test_the_seed_decides():
    images, labels = make(20, seed=3)
    again, _ = make(20, seed=3)
    other, _ = make(20, seed=4)
    assert_array_equal(images, again)
    assert (images != other).any()
    assert len(labels) == 20
