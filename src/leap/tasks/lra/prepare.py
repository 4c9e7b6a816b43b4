"""Make the data of the tasks: draw what follows a rule, read what others have collected."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from leap.errors import ConfigError, FileError, check_seed, refuse_given
from leap.reports.progress import Progress, Status, named, silent
from leap.tasks.files import data_folder
from leap.tasks.lra import cache, image, listops, pathfinder, retrieval, text
from leap.tasks.lra.cache import INFO, SPLITS, Examples
from leap.tasks.lra.data import DATA, TASKS, TaskInfo
from leap.tasks.lra.generate import Plan, generate
from leap.tasks.lra.sources import RELEASE, at_hand

TaskName = Literal["listops", "text", "image", "pathfinder", "retrieval", "retrieval-standin"]
Difficulty = Literal["easy", "intermediate", "hard"]

SIZES = {
    "listops": tuple(listops.SIZES.values()),
    "pathfinder": (160_000, 20_000, 20_000),
    "retrieval-standin": (8_000, 1_000, 1_000),
}
"""Examples to make for training, validation and test. Other tasks are as large as they come."""
SOURCES: dict[TaskName, tuple[str, ...]] = {
    "listops": (),
    "text": ("imdb", "aclImdb"),
    "image": (
        "cifar-10-batches-bin",
        "cifar-10-binary.tar.gz",
        "cifar-10-batches-py",
        "cifar-10-python.tar.gz",
        "cifar10-gray-sample",
    ),
    "pathfinder": (),
    "retrieval": (RELEASE,),
    "retrieval-standin": ("wikitext-2",),
}
"""What a task can be made from, in the folder of data sets: the first that is there is taken."""
HELD_OUT = 0.1
"""Share of the training set to hold out, in tasks that come without validation."""


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Make the data of Long Range Arena, or of some of its tasks, ready for training.

    ListOps and Pathfinder are generated. Text, Image and Retrieval are read from --source or from
    the folder of data sets (the environment variable LEAP_DATA); Text and Image, if they are asked
    for by name, also from the datasets library. What is there already is checked and kept.
    """

    task: tuple[TaskName, ...] = ()
    """Tasks; by default all that can be made from what is at hand."""
    output: Path = DATA
    """Folder to keep them in, each in a folder of its own."""
    source: Path | None = None
    """What to read one task from: an aclImdb folder (text), the archive or folder of CIFAR-10
    (image), or a folder of Long Range Arena's release (listops, retrieval). By default what is at
    hand."""
    train: int | None = None
    """Examples to train on. By default 96,000 of listops, 160,000 of pathfinder, all of others."""
    valid: int | None = None
    """Examples to validate on, none of them a test. By default 2,000 of listops, 20,000 of
    pathfinder, and a tenth of the training set of others."""
    test: int | None = None
    """Examples to test on. By default 2,000 of listops, 20,000 of pathfinder, all of others."""
    difficulty: Difficulty = "hard"
    """Of Pathfinder: curves of 6, 9 or 14 paddles; of ListOps: up to 127, 499 or 1,999 tokens.
    Long Range Arena reports hard."""
    max_length: int | None = None
    """Bytes that are read of a text; by default 4,000."""
    seed: int = 0
    """Random seed. What is drawn depends on it and the sizes, not on the number of workers."""
    workers: int | None = None
    """Processes that generate; by default one per core."""

    def __post_init__(self) -> None:
        for name in ("train", "valid", "test", "max_length", "workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more")
        check_seed(self.seed)
        if self.source is not None and len(self.task) != 1:
            raise ConfigError("a source is for one task; say by --task which one it is")
        if self.source is not None and self.task == ("pathfinder",):
            raise ConfigError("pathfinder is generated, and reads no source")
        if self.task and self.difficulty != "hard" and not any(map(_has_levels, self.task)):
            raise ConfigError(f"difficulty={self.difficulty} is for listops and pathfinder alone")
        if self.source is not None and self.difficulty != "hard":
            raise ConfigError(f"difficulty={self.difficulty} is generated, and reads no source")
        if self.task and self.max_length is not None and not any(map(_is_text, self.task)):
            raise ConfigError(f"max_length={self.max_length} is for text and retrieval alone")
        is_read = self.source is not None or not any(map(_has_levels, self.task))
        if self.task and is_read and not {"text", "retrieval-standin"} & set(self.task):
            named = " and ".join(self.task)
            refuse_given(self, ("seed",), f"of what is drawn, and {named} is read as it is")


@dataclass(frozen=True)
class Prepared:
    """A task that is ready."""

    name: str
    folder: Path
    facts: Mapping[str, Any]
    """What its `info.json` says."""
    found: bool
    """Whether it was there already."""


def tasks_at_hand() -> tuple[list[TaskName], dict[TaskName, str]]:
    """Tasks that can be made without a download, and the others with what is missing of them."""
    here: list[TaskName] = []
    missing: dict[TaskName, str] = {}
    for name, sources in SOURCES.items():
        if sources and at_hand(sources) is None:
            missing[name] = f"no {sources[0]} in {data_folder()} (LEAP_DATA)"
        else:
            here.append(name)
    return here, missing


def prepare(config: PrepareConfig, progress: Progress = silent) -> Iterator[Prepared]:
    """Make the tasks one by one, and give each when it is ready.

    A task appears in its folder whole or not at all, so one that was stopped is begun anew.
    """
    for task in config.task or tasks_at_hand()[0]:
        yield _prepare(config, task, progress)


def _prepare(config: PrepareConfig, task: TaskName, progress: Progress) -> Prepared:
    info = _task_info(config, task)
    folder = config.output / info.name
    source = config.source or at_hand(SOURCES[task])
    settings = _settings(config, task, info, source)
    if (folder / INFO).exists():
        facts = cache.read_info(folder)
        _check_same(folder, facts.get("settings", {}), settings)
        cache.verify(folder)
        return Prepared(info.name, folder, facts, found=True)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileError(f"{folder} holds something else; give another output folder")
    progress = named(progress, info.name)
    progress(Status(0, 0))
    splits = _make(config, task, info, source, progress)
    cache.write(folder, splits, {"task": vars(info), "settings": settings})
    return Prepared(info.name, folder, cache.read_info(folder), found=False)


def _make(
    config: PrepareConfig,
    task: TaskName,
    info: TaskInfo,
    source: Path | None,
    progress: Progress,
) -> dict[str, Examples]:
    length = info.max_length
    match task:
        case "listops" if source is not None:
            found = listops.read(source, length)
        case "listops":
            plan = Plan(_sizes(config, task), config.seed, config.workers, distinct=True)
            make = partial(listops.make_examples, lengths=listops.LENGTHS[config.difficulty])
            return generate(make, plan, progress)
        case "pathfinder":
            plan = Plan(_sizes(config, task), config.seed, config.workers)
            make = partial(pathfinder.make_examples, difficulty=config.difficulty)
            return generate(make, plan, progress)
        case "text":
            found = text.read(source, length, config.seed)
        case "image":
            found = image.read(source)
        case "retrieval":
            found = retrieval.read(source, length)
        case "retrieval-standin":
            return retrieval.make_standin(source, _sizes(config, task), length, config.seed)
    return _of_size(config, found)


def _task_info(config: PrepareConfig, task: TaskName) -> TaskInfo:
    if _has_levels(task) and config.difficulty != "hard":
        return TASKS[f"{task}-{config.difficulty}"]
    info = TASKS[task]
    if config.max_length is not None and _is_text(task):
        return replace(info, max_length=config.max_length)
    return info


def _has_levels(task: str) -> bool:
    return task in ("listops", "pathfinder")


def _is_text(task: str) -> bool:
    return task in ("text", "retrieval", "retrieval-standin")


def _sizes(config: PrepareConfig, task: str) -> dict[str, int]:
    return {
        split: getattr(config, split) or usual
        for split, usual in zip(SPLITS, SIZES[task], strict=True)
    }


def _settings(
    config: PrepareConfig, task: TaskName, info: TaskInfo, source: Path | None
) -> dict[str, Any]:
    """What decides over the data, as JSON has it."""
    asked = {split: getattr(config, split) for split in SPLITS}
    if source is not None:
        origin = source.name
    else:
        origin = "the datasets library" if SOURCES[task] else "generated"
    return {
        "source": origin,
        **(_sizes(config, task) if origin == "generated" else asked),
        "max_length": info.max_length,
        "seed": config.seed,
    }


def _check_same(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name, value in wanted.items():
        if found.get(name) != value:
            raise FileError(
                f"{folder} was made with {name}={found.get(name)}, not {value}; give another "
                "output folder, or remove this one"
            )


def _of_size(config: PrepareConfig, found: Mapping[str, Examples]) -> dict[str, Examples]:
    """As many examples as were asked for; for validation the last of the training set."""
    splits = dict(found)
    if "valid" not in splits:
        whole = splits["train"]
        n_valid = config.valid or round(len(whole) * HELD_OUT)
        n_train = len(whole) - n_valid
        if n_train < 1:
            raise ConfigError(
                f"valid={n_valid} leaves nothing to train on: there are {len(whole):,} examples"
            )
        splits["valid"] = whole.part(n_train, len(whole))
        splits["train"] = whole.part(0, n_train)
    for split in SPLITS:
        asked, there = getattr(config, split), len(splits[split])
        if asked is not None and asked > there:
            raise ConfigError(f"{split}={asked} examples were asked for, and there are {there:,}")
        splits[split] = splits[split].part(0, asked or there)
    return {split: splits[split] for split in SPLITS}
