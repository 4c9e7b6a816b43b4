"""Settings of the server, and the server itself."""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leap.errors import ConfigError, FileError, LeapError, refuse_given
from leap.reports.files import read_json
from leap.runtime.manifest import is_export

MIB = 2**20
TOKEN = "LEAP_TOKEN"
"""The environment variable that a token is taken from."""
OF_LANGUAGE_MODELS = (
    *("waiting", "max_tokens", "max_prompt", "block", "budget"),
    *("states", "state_memory", "prefix_memory"),
)
"""Settings that translation streams have no use for."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Serve a model to many users: OpenAI's completions, or translation streams.

    A language model is served as /v1/completions, to the openai package and other clients; a
    translation model as the WebSocket /v1/translations. Ctrl-C ends it, after the replies that are
    under way.
    """

    run: Path
    """Run folder of leap lm train or leap simul train, a folder of leap export, or one with a
    Hugging Face model."""
    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 for every network of this machine."""
    port: int = 8000
    """Port to listen at; 0 for a free one."""
    token: str | None = None
    """Bearer token that requests must have; by default the environment variable LEAP_TOKEN, and
    none if there is none."""
    slots: int = 64
    """Replies that are written at once, or translation streams that are open."""
    waiting: int = 256
    """Of language models: requests that may wait for a slot; more are told to try again later."""
    max_tokens: int = 4096
    """Of language models: most tokens of a reply."""
    max_prompt: int = 65536
    """Of language models: most tokens of a prompt."""
    max_body: int = 1024
    """Most KiB of a request's body, or of a message of a stream."""
    seconds: float = 300.0
    """Most seconds that a reply may take, waiting included, and that a stream may be silent."""
    grace: int = 30
    """Seconds that replies under way have to end in, when the server is stopped."""
    block: int = 128
    """Of language models: tokens of a prompt that are read at once; at these places a shared prefix
    can be used."""
    budget: int = 512
    """Of language models: tokens of prompts that are read between two steps of writing."""
    states: Path | None = None
    """Of language models: folder that states are saved to and loaded from; by default none are."""
    state_memory: int = 256
    """Of language models: MiB for states of replies, of which the oldest give way."""
    prefix_memory: int = 256
    """Of language models: MiB for states of prompts' beginnings, of which the oldest give way."""
    policy: str = "wait-3"
    """Of translation: when to write, unless a client says."""
    threads: int | None = None
    """CPU threads that compute; by default as many as torch takes, and 1 for an exported model."""

    def __post_init__(self) -> None:
        counts = ("slots", "max_tokens", "max_prompt", "max_body", "grace", "block", "budget")
        for name in counts:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be 1 or more")
        for name in ("waiting", "state_memory", "prefix_memory"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be 0 or more")
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port={self.port} must be from 0 to {2**16 - 1}")
        if not 0 < self.seconds < float("inf"):
            raise ConfigError(f"seconds={self.seconds} must be more than 0")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads={self.threads} must be 1 or more")
        if self.states is not None and not self.states.is_dir():
            raise FileError(f"states={self.states} is no folder; make it first")
        if self.token is not None and not self.token.strip():
            raise ConfigError("token is empty; give one, or leave it out")


def build(config: ServeConfig) -> Any:
    """The application that a config describes."""
    from leap.serve.app import Access, make_app
    from leap.serve.completions import Limits

    limits = Limits(
        max_tokens=config.max_tokens,
        max_prompt=config.max_prompt,
        max_choices=min(16, config.slots),
    )
    access = Access(
        limits=limits,
        max_body=1024 * config.max_body,
        seconds=config.seconds,
        token=config.token or os.environ.get(TOKEN) or None,
        folder=config.states,
    )
    if translates(config.run):
        of_texts = f"of language models, and {config.run} translates"
        refuse_given(config, OF_LANGUAGE_MODELS, of_texts)
        return make_app(translations=_translations(config), access=access)
    refuse_given(config, ("policy",), f"of translation, and {config.run} is a language model")
    from leap.serve.engine import Engine

    engine = Engine(
        _language_model(config),
        slots=config.slots,
        waiting=config.waiting,
        block=config.block,
        budget=config.budget,
        state_bytes=MIB * config.state_memory,
        prefix_bytes=MIB * config.prefix_memory,
    )
    return make_app(engine=engine, access=access)


def serve(config: ServeConfig, started: Callable[[str], None] = lambda url: None) -> None:
    """Serve until it is told to stop by Ctrl-C or SIGTERM.

    Args:
        config: what to serve, and how.
        started: is told the address, once requests are answered.
    """
    if config.threads is not None and not is_export(config.run):
        import torch

        torch.set_num_threads(config.threads)
    app = build(config)
    with listen(config.host, config.port) as listening:
        run_server(app, listening, started, grace=config.grace, ws_max_size=1024 * config.max_body)


def run_server(
    app: Any,
    listening: socket.socket,
    started: Callable[[str], None] = lambda url: None,
    *,
    grace: int,
    **settings: Any,
) -> None:
    """Run an ASGI application until it is told to stop by Ctrl-C or SIGTERM.

    Args:
        app: the application.
        listening: what `listen` gave.
        started: is told the address, once requests are answered.
        grace: seconds that what is under way has to end in.
        settings: more of uvicorn's.
    """
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                host, port = listening.getsockname()[:2]
                started(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    chosen = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        ws="websockets-sansio",
        timeout_graceful_shutdown=grace,
        **settings,
    )
    Server(chosen).run(sockets=[listening])


def translates(run: Path) -> bool:
    """Whether a folder holds a translation model."""
    if is_export(run):
        from leap.serve.exported import manifest_of

        return manifest_of(run).task != "lm"
    for folder in (run / "model", run):
        if (folder / "config.json").is_file():
            found = read_json(folder / "config.json")
            kinds = found.get("architectures") if isinstance(found, dict) else None
            return any("Seq2Seq" in str(kind) for kind in kinds or ())
    return False


def _language_model(config: ServeConfig) -> Any:
    if is_export(config.run):
        from leap.serve.exported import ExportedModel

        return ExportedModel(config.run, config.threads or 1)
    from leap.serve.models import load

    return load(config.run)


def _translation_model(config: ServeConfig) -> Any:
    if is_export(config.run):
        from leap.serve.exported import ExportedTranslation

        return ExportedTranslation(config.run, config.threads or 1)
    from leap.tasks.simul.streaming.stream import load_trained

    return load_trained(config.run)


def _translations(config: ServeConfig) -> Any:
    from leap.serve.translate import Translations

    return Translations(
        _translation_model(config),
        config.run.resolve().name,
        policy=config.policy,
        max_streams=config.slots,
    )


def listen(host: str, port: int) -> socket.socket:
    """A socket at an address, port 0 for a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise LeapError(
            f"cannot listen at {host} port {port} ({error.strerror or error}); choose another"
        ) from error
