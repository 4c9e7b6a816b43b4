"""Settings of the page, and the server behind it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from leap.errors import ConfigError, FileError

BENCHMARKS = Path("benchmarks")


@dataclass(frozen=True, kw_only=True)
class AppConfig:
    """Open a page to write, explain, interpret and compare in, on this machine alone.

    Nothing leaves the machine: the page asks no other server for anything. Ctrl-C ends it.
    """

    run: tuple[Path, ...] = ()
    """Run folders of leap lm train, leap lra train or leap simul train, folders of leap export, or
    folders with a Hugging Face model; by default the models that come with the package."""
    benchmarks: Path | None = None
    """Folder of recorded benchmarks, each a folder with JSON files; by default benchmarks, if it is
    here."""
    host: str = "127.0.0.1"
    """Address to listen at; others than this machine's own let other people in."""
    port: int = 7860
    """Port to listen at; 0 for a free one."""
    max_characters: int = 4000
    """Most characters of a text."""
    max_tokens: int = 500
    """Most tokens to write at once."""
    max_seconds: float = 60.0
    """Most seconds of a sound."""
    max_upload: int = 20
    """Most MiB of a file that is uploaded."""
    at_once: int = 4
    """Requests of a kind that are worked on at once."""
    waiting: int = 100
    """Requests that may wait; more are told to try again later."""

    def __post_init__(self) -> None:
        for name in ("max_characters", "max_tokens", "max_upload", "at_once", "waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be 1 or more")
        if not 0 < self.max_seconds < float("inf"):
            raise ConfigError(f"max_seconds={self.max_seconds} must be more than 0")
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port={self.port} must be from 0 to {2**16 - 1}")
        if self.benchmarks is not None and not self.benchmarks.is_dir():
            raise FileError(f"benchmarks={self.benchmarks} is no folder; give one with results")

    @property
    def recorded(self) -> Path | None:
        """Where benchmarks are; None for nowhere."""
        return self.benchmarks or (BENCHMARKS if BENCHMARKS.is_dir() else None)


def serve(config: AppConfig, started: Callable[[str], None] = lambda url: None) -> None:
    """Serve the page until it is told to stop by Ctrl-C or SIGTERM.

    Args:
        config: what to show, and where.
        started: is told the address, once the page is answered.
    """
    from leap.app.models import open_models
    from leap.app.page import application
    from leap.serve.config import listen, run_server

    models = open_models(config.run)
    with application(models, config) as app, listen(config.host, config.port) as listening:
        run_server(app, listening, started, grace=2)
