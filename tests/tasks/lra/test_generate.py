import numpy as np
import pytest
from numpy.testing import assert_array_equal

from leap.reports.progress import silent
from leap.tasks.lra import generate as generating
from leap.tasks.lra.cache import Examples, Sequences
from leap.tasks.lra.generate import Plan, generate

SIZES = {"train": 1200, "valid": 300, "test": 700}


def make(count, chance, kinds=1 << 40):
    """Short sequences, each one of so many kinds; the class is the last token."""
    numbers = chance.integers(0, kinds, count)
    rows = numbers.astype("<u8").view(np.uint8).reshape(count, 8)
    return Examples(Sequences.rows(rows), rows[:, 0] % 10)


def make_few_kinds(count, chance):
    return make(count, chance, kinds=1000)


def run(make=make, seed=0, workers=1, distinct=False, progress=silent, **sizes):
    return generate(make, Plan({**SIZES, **sizes}, seed, workers, distinct), progress)


def assert_same(a, b):
    for ours, theirs in zip(a.values(), b.values(), strict=True):
        assert_array_equal(ours.inputs.tokens, theirs.inputs.tokens)
        assert_array_equal(ours.inputs.offsets, theirs.inputs.offsets)
        assert_array_equal(ours.labels, theirs.labels)


def test_the_number_of_processes_does_not_matter():
    made = run()
    assert {split: len(examples) for split, examples in made.items()} == SIZES
    assert_same(made, run(workers=3))


def test_the_seed_does():
    made, other = run(), run(seed=1)
    for split in SIZES:
        assert (made[split].inputs.tokens != other[split].inputs.tokens).mean() > 0.5


def test_splits_are_drawn_apart():
    made = run()
    assert made["train"].inputs[0].tolist() != made["test"].inputs[0].tolist()


def test_fewer_to_train_on_leave_the_other_splits_as_they_are():
    made, fewer = run(distinct=True), run(distinct=True, train=10)
    assert len(fewer["train"]) == 10
    assert_same(
        {split: made[split] for split in ("valid", "test")},
        {split: fewer[split] for split in ("valid", "test")},
    )


def test_repeats_are_dropped_within_splits_and_between_them():
    sizes = {"train": 600, "valid": 100, "test": 200}
    made = run(make_few_kinds, distinct=True, **sizes)
    assert {split: len(examples) for split, examples in made.items()} == sizes
    kinds = [bytes(part.inputs[i]) for part in made.values() for i in range(len(part))]
    assert len(set(kinds)) == len(kinds) == 900
    # Without that there would be many.
    made = run(make_few_kinds, **sizes)
    kinds = [bytes(part.inputs[i]) for part in made.values() for i in range(len(part))]
    assert len(set(kinds)) < 700


def test_progress_goes_up_to_the_total():
    told = []
    run(progress=lambda status: told.append((status.step, status.steps)))
    assert told == sorted(told) and told[-1] == (2200, 2200)


def test_what_goes_wrong_in_a_process_comes_out():
    with pytest.raises(ZeroDivisionError):
        run(fail, workers=2)


def fail(count, chance):
    return 1 // 0


def test_there_are_cores():
    assert generating.cores() >= 1
