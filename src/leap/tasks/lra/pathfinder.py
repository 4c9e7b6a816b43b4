"""Pathfinder: two dots among dashed curves; do they lie on one curve?

After Linsley et al. (2018), with Long Range Arena's settings for 32 x 32 pixels. Two curves of
equally many paddles grow in turn from places 7 pixels apart; shorter curves are added to distract;
one dot marks the start of a curve, the other the end of the same curve (class 1) or of the other.

A curve grows by a paddle from its pivot, the place just before the paddle:

    pivot     the last one, moved on by a paddle and two margins in the direction of the last paddle
    end       one of the pixels at a paddle and a margin from the pivot, drawn with the weight
              (1 - what is beside the pixel already) * max(cos(turn), 0)^2
    refused   where the paddle's surroundings and what is there already add up to 1.8 or more

Long curves seldom fit, and a pair that fails is begun anew. So thousands of pairs grow at a time, a
step of each in a few array operations, and only those that succeed are drawn.

Places are numbers of pixels in the picture with a frame around it, row by row.
Axes: n pictures, d directions, c candidate ends, s pixels of a stamp.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8
from PIL import Image, ImageDraw

from leap.tasks.lra.cache import Examples, Sequences

SIDE = 32
FRAME = 6
"""Pixels around the picture, which candidates and stamps may reach into."""
WIDE = SIDE + 2 * FRAME

PADDLE = 2  # Lengths are in pixels.
MARGIN = 1
STAMP = 4  # From the middle of a stamp to its edge: a paddle, its margin, and its thickness.
FINER = 2  # Paddles and dots are drawn at this multiple of the size, and then made smaller.
SEED_DISTANCE = 7
DOT_RADIUS = 1.5

CURVE_CONTRAST = 1.5  # Of a paddle, 0.75, times that of a curve, 2.
DISTRACTOR_CONTRAST = 2.0

OVERLAP = 459  # 1.8 in units of 1/255.
OCCUPIED = 77  # More than 0.3 in the same units.
PADDLE_TRIALS = 3
DISTRACTOR_TRIALS = 5
LEAST_FREE = 0.01  # No distractor is begun where a smaller share of the picture is free.

PADDLES = {"easy": 6, "intermediate": 9, "hard": 14}
"""Paddles of each of the two curves, by difficulty."""
AT_ONCE = 2048
"""Pairs of curves that grow at a time."""


def make_examples(count: int, chance: np.random.Generator, difficulty: str = "hard") -> Examples:
    """Make pictures, read row by row, and their classes."""
    n_paddles = PADDLES[difficulty]
    grown: list[_Curves] = []
    while sum(map(len, grown)) < count:
        grown.append(_grow_pairs(AT_ONCE, n_paddles, chance))
    pairs = _Curves.join(grown).take(np.arange(count))
    distractors = _grow_distractors(pairs.mask, n_paddles // 3, 20 // (n_paddles // 3), chance)
    images, labels = _draw(pairs, distractors, chance)
    return Examples(Sequences.rows(images), labels)


@dataclass(frozen=True)
class _Curves:
    """Curves of many pictures: where their paddles are, and what they take up of each picture."""

    places: Int[np.ndarray, "n curves paddles"]
    directions: Int[np.ndarray, "n curves paddles"]
    mask: UInt8[np.ndarray, "n pixels"]

    def __len__(self) -> int:
        return len(self.mask)

    @classmethod
    def join(cls, parts: "list[_Curves]") -> "_Curves":
        return cls(*(np.concatenate(arrays) for arrays in zip(*map(_arrays, parts), strict=True)))

    def take(self, rows: Int[np.ndarray, " m"]) -> "_Curves":
        return _Curves(*(array[rows] for array in _arrays(self)))


def _arrays(curves: _Curves) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return curves.places, curves.directions, curves.mask


@dataclass(frozen=True)
class _Tips:
    """Where one curve of each picture has got to."""

    places: Int[np.ndarray, " n"]
    """The start of a first paddle, the end of any other."""
    directions: Int[np.ndarray, " n"]
    pivots: Int[np.ndarray, " n"]

    def take(self, rows: Int[np.ndarray, " m"]) -> "_Tips":
        return _Tips(self.places[rows], self.directions[rows], self.pivots[rows])


@dataclass(frozen=True)
class _Tables:
    """All that depends on directions alone.

    First come the directions a curve can begin with, by degrees from -180; then those from a pivot
    to each candidate end. The paddles of the first kind are drawn from their place onwards, those
    of the second backwards.
    """

    ends: Int[np.ndarray, " c"]
    """From a pivot to the candidate ends."""
    weights: Float[np.ndarray, "d c"]
    """Of a candidate after a direction, where all is free."""
    onward: Int[np.ndarray, "2 d wide"]
    """From a pivot to the next: the row after each row, and the column after each column."""
    tip: Int[np.ndarray, "2 d wide"]
    """From the place of a first paddle to its other end."""
    first_pivot: Int[np.ndarray, "2 d wide"]
    """From the place of a first paddle to its pivot."""
    stamp: Int[np.ndarray, " s"]
    """From the middle of a stamp to its pixels."""
    lines: UInt8[np.ndarray, "d s"]
    """The paddle."""
    masks: UInt8[np.ndarray, "d s"]
    """The paddle and its surroundings."""
    critical: Int[np.ndarray, "d k"]
    """From its place to the pixels where a paddle's mask alone can be refused."""
    critical_masks: Int[np.ndarray, "d k"]
    needs: Int[np.ndarray, "d m"]
    """From the place of a first paddle to the pixels that must be free."""
    begins: Bool[np.ndarray, " d"]
    """Whether a curve can begin in this direction."""


def _grow_pairs(count: int, n_paddles: int, chance: np.random.Generator) -> _Curves:
    """Begin `count` pairs of curves, and return those that found room for all their paddles."""
    mask = np.repeat(_empty_mask()[None], count, axis=0)
    first = _first_seeds(count, chance)
    angle = np.radians(chance.integers(0, 360, count))
    y, x = np.divmod(first.places, WIDE)
    y = np.rint(y + SEED_DISTANCE * np.sin(angle)).astype(np.int64)
    x = np.rint(x + SEED_DISTANCE * np.cos(angle)).astype(np.int64)
    second = _seed(y * WIDE + x, chance.integers(0, 360, count))

    places = np.zeros((count, 2, n_paddles), np.int64)
    directions = np.zeros_like(places)
    tips = [first, second]
    for which, tip in enumerate(tips):
        places[:, which, 0] = tip.places
        directions[:, which, 0] = tip.directions
    rows = np.arange(count)
    for i in range(1, n_paddles):
        for which in (0, 1):
            found, after = _extend(mask, rows, tips[which], chance)
            rows, last = rows[found], tips[which].take(found)
            # A paddle is in the way of all others once the next one is there.
            _press(mask, rows, last)
            tips = [tip.take(found) for tip in tips]
            tips[which] = after
            places[rows, which, i] = after.places
            directions[rows, which, i] = after.directions
    _press(mask, rows, tips[1])
    return _Curves(places[rows], directions[rows], mask[rows])


def _grow_distractors(
    mask: UInt8[np.ndarray, "n pixels"], n_paddles: int, n_curves: int, chance: np.random.Generator
) -> tuple[Int[np.ndarray, "n curves paddles"], Int[np.ndarray, "n curves paddles"]]:
    """Places and directions of short curves in what `mask` leaves free; -1 where none fits."""
    mask = mask.copy()
    places = np.full((len(mask), n_curves, n_paddles), -1, np.int64)
    directions = np.full_like(places, -1)
    for curve in range(n_curves):
        wanting = np.arange(len(mask))
        for _ in range(DISTRACTOR_TRIALS):
            rows, tip = _free_seeds(mask, wanting, chance)
            tried = mask[rows]
            among = np.arange(len(rows))
            path = np.zeros((2, len(rows), n_paddles), np.int64)
            path[0, :, 0], path[1, :, 0] = tip.places, tip.directions
            for i in range(1, n_paddles):
                found, after = _extend(tried, among, tip, chance)
                among = among[found]
                _press(tried, among, tip.take(found))
                tip = after
                path[0, among, i], path[1, among, i] = tip.places, tip.directions
            _press(tried, among, tip)
            done = rows[among]
            mask[done] = tried[among]
            places[done, curve], directions[done, curve] = path[:, among]
            wanting = np.setdiff1d(wanting, done, assume_unique=True)
    return places, directions


def _extend(
    mask: UInt8[np.ndarray, "n pixels"],
    rows: Int[np.ndarray, " m"],
    last: _Tips,
    chance: np.random.Generator,
) -> tuple[Int[np.ndarray, " found"], _Tips]:
    """Find the next paddle of a curve in each of the `rows`: which of them have one, and where."""
    tables = _tables()
    pivots = _go(tables.onward, last.pivots, last.directions)
    ends = pivots[:, None] + tables.ends
    pixels = mask.reshape(-1)
    at = (rows * mask.shape[1])[:, None] + ends
    beside = pixels[at]
    for step in (-WIDE, -1, 1, WIDE):
        np.maximum(beside, pixels[at + step], out=beside)
    free = (255 - beside) * _inside()[ends]
    so_far = (tables.weights[last.directions] * free).cumsum(axis=1)
    total = so_far[:, -1]

    chosen = np.zeros(len(rows), np.int64)
    fits = np.zeros(len(rows), bool)
    trying = np.flatnonzero(total >= 255e-4)
    for _ in range(PADDLE_TRIALS):
        aim = chance.random(len(trying)) * total[trying]
        choice = (so_far[trying] > aim[:, None]).argmax(axis=1)
        middle = rows[trying] * mask.shape[1] + ends[trying, choice]
        directions = SEED_DIRECTIONS + choice
        there = pixels[middle[:, None] + tables.critical[directions]]
        refused = (there + tables.critical_masks[directions] >= OVERLAP).any(axis=1)
        accepted = trying[~refused]
        chosen[accepted] = choice[~refused]
        fits[accepted] = True
        trying = trying[refused]
    found = np.flatnonzero(fits)
    chosen = chosen[found]
    return found, _Tips(ends[found, chosen], SEED_DIRECTIONS + chosen, pivots[found])


def _press(mask: UInt8[np.ndarray, "n pixels"], rows: Int[np.ndarray, " m"], tips: _Tips) -> None:
    """Note in the `rows` of the mask what the paddles at the tips take up."""
    tables = _tables()
    at = (rows * mask.shape[1] + tips.places)[:, None] + tables.stamp
    pixels = mask.reshape(-1)
    pixels[at] = np.maximum(pixels[at], tables.masks[tips.directions])


def _seed(places: Int[np.ndarray, " n"], directions: Int[np.ndarray, " n"]) -> _Tips:
    return _Tips(places, directions, _go(_tables().first_pivot, places, directions))


def _first_seeds(count: int, chance: np.random.Generator) -> _Tips:
    """First paddles near the middle of the picture: any direction that has room, any such place."""
    places, n_places = _room_in_the_middle()
    directions = chance.choice(np.flatnonzero(n_places), count)
    choice = chance.integers(0, n_places[directions])
    return _seed(places[directions, choice], directions)


def _free_seeds(
    mask: UInt8[np.ndarray, "n pixels"], rows: Int[np.ndarray, " m"], chance: np.random.Generator
) -> tuple[Int[np.ndarray, " found"], _Tips]:
    """First paddles where the mask leaves room: for which of the `rows`, and where."""
    tables = _tables()
    occupied = mask[rows] >= OCCUPIED
    enough = (~occupied[:, _inside()]).mean(axis=1) >= LEAST_FREE
    rows, occupied = rows[enough], occupied[enough]
    directions = np.zeros(len(rows), np.int64)
    places = np.full(len(rows), -1)
    trying = np.arange(len(rows))
    for _ in range(PADDLE_TRIALS):
        directions[trying] = chance.integers(0, SEED_DIRECTIONS, len(trying))
        room = _room(occupied[trying], directions[trying])
        n_places = room.sum(axis=1)
        trying, room, n_places = (array[n_places > 0] for array in (trying, room, n_places))
        choice = chance.integers(0, n_places)
        at = _inner()[(room.cumsum(axis=1) > choice[:, None]).argmax(axis=1)]
        turned = directions[trying]
        within = _inside()[_go(tables.tip, at, turned)]
        within &= _inside()[_go(tables.first_pivot, at, turned)]
        places[trying[within]] = at[within]
        trying = trying[~within]
    found = np.flatnonzero(places >= 0)
    return rows[found], _seed(places[found], directions[found])


def _room(
    occupied: Bool[np.ndarray, "n pixels"], directions: Int[np.ndarray, " n"]
) -> Bool[np.ndarray, "n inner"]:
    """Which pixels of the picture can be the place of a first paddle."""
    pixels = occupied.reshape(-1)
    start = np.arange(len(occupied)) * occupied.shape[1]
    room = np.repeat(_tables().begins[directions][:, None], SIDE * SIDE, axis=1)
    for needs in _tables().needs[directions].T:
        room &= ~pixels[(start + needs)[:, None] + _inner()]
    return room


def _draw(
    pairs: _Curves,
    distractors: tuple[Int[np.ndarray, "n curves paddles"], Int[np.ndarray, "n curves paddles"]],
    chance: np.random.Generator,
) -> tuple[UInt8[np.ndarray, "n pixels"], UInt8[np.ndarray, " n"]]:
    n = len(pairs)
    canvas = np.zeros((n, WIDE * WIDE))
    _draw_paddles(canvas, pairs.places, pairs.directions, CURVE_CONTRAST)
    _draw_paddles(canvas, *distractors, DISTRACTOR_CONTRAST)
    labels = chance.integers(0, 2, n)
    curve = chance.integers(0, 2, n)
    row = np.arange(n)
    start = pairs.places[row, curve, 0]
    end = pairs.places[row, np.where(labels == 1, curve, 1 - curve), -1]
    images = canvas[:, _inner()]
    for dot in (start, end):
        np.maximum(images, _dots()[dot] / 255, out=images)
    return _stretch(images), labels.astype(np.uint8)


def _draw_paddles(
    canvas: Float[np.ndarray, "n pixels"],
    places: Int[np.ndarray, "n curves paddles"],
    directions: Int[np.ndarray, "n curves paddles"],
    contrast: float,
) -> None:
    tables = _tables()
    shades = (tables.lines / 255 * contrast).astype(np.float32)
    pixels = canvas.reshape(-1)
    for place, direction in zip(
        places.reshape(len(places), -1).T, directions.reshape(len(places), -1).T, strict=True
    ):
        row = np.flatnonzero(place >= 0)
        at = (row * canvas.shape[1] + place[row])[:, None] + tables.stamp
        pixels[at] = np.maximum(pixels[at], shades[direction[row]])


def _stretch(images: Float[np.ndarray, "n pixels"]) -> UInt8[np.ndarray, "n pixels"]:
    """Shades from the darkest, 0, to the brightest, 255, of each picture."""
    low, high = images.min(axis=1, keepdims=True), images.max(axis=1, keepdims=True)
    return ((images - low) * (255 / (high - low)) + 0.5).astype(np.uint8)


SEED_DIRECTIONS = 360


@cache
def _inside() -> Bool[np.ndarray, " pixels"]:
    """Which places are in the picture, rather than in the frame around it."""
    inside = np.zeros((WIDE, WIDE), bool)
    inside[FRAME:-FRAME, FRAME:-FRAME] = True
    return inside.reshape(-1)


@cache
def _inner() -> Int[np.ndarray, " inner"]:
    """The places in the picture, row by row."""
    return np.flatnonzero(_inside())


@cache
def _empty_mask() -> UInt8[np.ndarray, " pixels"]:
    """A picture's outermost pixels are taken."""
    mask = np.zeros((WIDE, WIDE), np.uint8)
    mask[FRAME:-FRAME, FRAME:-FRAME] = 255
    mask[FRAME + 1 : -FRAME - 1, FRAME + 1 : -FRAME - 1] = 0
    return mask.reshape(-1)


@cache
def _room_in_the_middle() -> tuple[Int[np.ndarray, "d places"], Int[np.ndarray, " d"]]:
    """Places of a first paddle away from the edges, and how many there are, by direction."""
    occupied = np.zeros((WIDE, WIDE), bool)
    occupied[FRAME:-FRAME, FRAME:-FRAME] = True
    edge = FRAME + 2 * SEED_DISTANCE
    occupied[edge:-edge, edge:-edge] = False
    room = _room(
        np.repeat(occupied.reshape(1, -1), SEED_DIRECTIONS, axis=0), np.arange(SEED_DIRECTIONS)
    )
    # Those with room come first.
    order = np.argsort(~room, axis=1, kind="stable")
    return _inner()[order], room.sum(axis=1)


@cache
def _tables() -> _Tables:
    circle = np.radians(np.arange(0, 360, 360 / (2 * np.pi * (PADDLE + MARGIN))))
    reach = PADDLE + MARGIN
    candidates = np.unique(
        np.floor([reach * np.sin(circle), reach * np.cos(circle)]).astype(np.int64), axis=1
    )
    seeds = np.radians(np.arange(-180, 180))
    towards = np.arctan2(candidates[0], candidates[1])
    directions = np.concatenate([seeds, towards])
    backwards = np.where(directions < 0, directions + np.pi, directions - np.pi)

    turn = np.abs(directions[:, None] - towards)
    turn = np.minimum(turn, 2 * np.pi - turn)
    weights = np.cos(np.minimum(turn, np.pi / 2)) ** 2

    tip, back = _move(directions, PADDLE), _move(backwards, PADDLE + MARGIN)
    drawn_towards = np.concatenate([seeds, backwards[SEED_DIRECTIONS:]])
    middle = STAMP * FINER
    drawn_ends = _move(drawn_towards, PADDLE * FINER)[:, :, FRAME + middle] - FRAME - middle
    stamps = [_stamp(*end) for end in drawn_ends.T.tolist()]
    lines, masks = (np.stack(part) for part in zip(*stamps, strict=True))
    y, x = np.mgrid[-STAMP : STAMP + 1, -STAMP : STAMP + 1].reshape(2, -1)
    stamp = y * WIDE + x
    # Room for a first paddle is sought for the middle of its mask without its last two rows and
    # columns, and a pixel off its place.
    needed = (masks == 255) & (y <= STAMP - 2) & (x <= STAMP - 2)
    needs = _picked(needed, stamp + WIDE + 1)
    # The original finds no room at all in a direction whose needs are all beyond the edge for some
    # place in the picture. That leaves 31 of 360 degrees: every curve but the second of a pair
    # begins up and to the left. The data is defined by it, so it is kept.
    begins = _inside()[_inner()[:, None, None] + needs].any(axis=2).all(axis=0)
    return _Tables(
        ends=candidates[0] * WIDE + candidates[1],
        weights=weights,
        onward=_move(directions, PADDLE + 2 * MARGIN),
        tip=tip,
        first_pivot=np.take_along_axis(back, tip, axis=2),
        stamp=stamp,
        lines=lines,
        masks=masks,
        critical=_picked(masks >= OVERLAP - 255, stamp),
        critical_masks=_picked(masks >= OVERLAP - 255, masks.astype(np.int64)),
        needs=needs,
        begins=begins,
    )


def _move(directions: Float[np.ndarray, " d"], distance: int) -> Int[np.ndarray, "2 d wide"]:
    """Where each row and each column is left for, by direction; rounded up."""
    # Straight down, 4 cos(pi / 2) is not quite 0, and rounds column 2 up to 3, but not column 4,
    # in whose sum it is lost. The original does the same, and its curves keep off the left edge.
    steps = distance * np.array([np.sin(directions), np.cos(directions)])
    moved = np.ceil(np.arange(-FRAME, WIDE - FRAME) + steps[:, :, None]).astype(np.int64)
    return (moved + FRAME).clip(0, WIDE - 1)


def _go(
    table: Int[np.ndarray, "2 d wide"],
    places: Int[np.ndarray, " n"],
    directions: Int[np.ndarray, " n"],
) -> Int[np.ndarray, " n"]:
    row, column = np.divmod(places, WIDE)
    return table[0, directions, row] * WIDE + table[1, directions, column]


def _picked(
    which: Bool[np.ndarray, "d s"], values: Int[np.ndarray, "d s"] | Int[np.ndarray, " s"]
) -> Int[np.ndarray, "d k"]:
    """The values of the pixels picked, the first repeated where there are fewer than elsewhere."""
    values = np.broadcast_to(values, which.shape)
    most = which.sum(axis=1).max()
    rows = [row[picked] for row, picked in zip(values, which, strict=True)]
    return np.stack([np.pad(row, (0, most - len(row)), constant_values=row[0]) for row in rows])


@cache
def _stamp(down: int, right: int) -> tuple[UInt8[np.ndarray, " s"], UInt8[np.ndarray, " s"]]:
    """A paddle and its mask, given where its end lies from its start in the finer drawing."""
    middle = STAMP * FINER
    fine = Image.new("L", (2 * middle + 1, 2 * middle + 1))
    ImageDraw.Draw(fine).line(
        [(middle, middle), (middle + right, middle + down)], fill=255, width=1
    )
    wide = np.pad(np.asarray(fine), MARGIN * FINER)
    near = [wide[y:, x:][: fine.height, : fine.width] for y, x in _disc(MARGIN * FINER)]
    return _reduce(fine), _reduce(Image.fromarray(np.max(near, axis=0)))


def _disc(radius: int) -> list[tuple[int, int]]:
    """Pixels of a disc, from the corner of the square around it."""
    y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    return [(int(i), int(j)) for i, j in np.argwhere(y**2 + x**2 <= radius**2)]


def _reduce(fine: Image.Image) -> UInt8[np.ndarray, " s"]:
    side = -(-fine.width // FINER)
    return np.asarray(fine.resize((side, side), Image.Resampling.LANCZOS)).reshape(-1)


@cache
def _dots() -> UInt8[np.ndarray, "pixels inner"]:
    """The picture with a dot at each place, and nothing for places in the frame."""
    dots = np.zeros((WIDE * WIDE, SIDE * SIDE), np.uint8)
    y, x = np.mgrid[: SIDE * FINER, : SIDE * FINER]
    for i, place in enumerate(_inner()):
        down, right = np.array(divmod(i, SIDE)) * FINER
        disc = (y - down) ** 2 + (x - right) ** 2 <= (DOT_RADIUS * FINER) ** 2
        dots[place] = _reduce(Image.fromarray(disc.astype(np.uint8) * 255))
    return dots
