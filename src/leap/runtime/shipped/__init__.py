"""Models that come with the package, each a folder of `leap export` in 8 bits, with its card.

    stream = Translator(shipped("en-de")).stream()
    stream.push("I would like a cup of coffee.")

en-de   text, everyday sentences from English to German
"""

from pathlib import Path

from leap.errors import ConfigError
from leap.runtime.manifest import is_export

HERE = Path(__file__).parent


def shipped(name: str) -> Path:
    """The folder of a model that comes with the package."""
    if name not in names():
        there = ", ".join(names())
        raise ConfigError(f"no model {name!r} comes with the package; there are {there}")
    return HERE / name


def names() -> list[str]:
    """The models that come with the package."""
    return sorted(folder.name for folder in HERE.iterdir() if is_export(folder))
