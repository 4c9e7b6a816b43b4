"""Translation streams over a WebSocket: text or sound in, words out as they can be said.

A client sends JSON, and for a model of speech binary messages of 16-bit PCM, little-endian, mono:

    {"type": "start", "policy": "wait-5", "sample_rate": 48000}     first, if it is sent at all
    {"type": "text", "text": "A man in an orange "}
    {"type": "end"}                                                 the source has ended

and is sent

    {"type": "ready", "source": "text", "policy": "wait-5", "sample_rate": null}
    {"type": "words", "words": ["Ein", "Mann"]}
    {"type": "end", "words": 6}                                     the stream is then as new
    {"type": "error", "message": "..."}                             the stream is as it was before

Streams that have something to read at the same time are stepped as one batch.
"""

import asyncio
import contextlib
import json
import queue
import threading
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from starlette.websockets import WebSocket, WebSocketDisconnect

from leap.errors import LeapError
from leap.runtime.fbank import Extractor
from leap.runtime.streaming.stream import Interpreter, Stream, StreamPool
from leap.serve.errors import ApiError
from leap.tasks.simul.audio.files import Resampler

SLOWEST, FASTEST = 4000, 192_000
"""Samples per second that sound may have."""
MOST_POLICIES = 16
"""Policies whose interpreters are kept."""
TRY_LATER, NO_POLICY = 1013, 1008
"""Codes by which a WebSocket is closed: too many streams; too long a silence."""


@runtime_checkable
class Trained(Protocol):
    """A translation model: of a run, or exported."""

    @property
    def extractor(self) -> Extractor | None:
        """Makes frames of sound, for a model of speech; None for one of text."""

    def interpreter(self, policy: str, *, reset: int | None = None) -> Interpreter:
        """The model with a policy."""


@dataclass
class Push:
    """Something that has come for a stream."""

    session: "Session"
    source: Any
    """Text or samples; None if only the end has come."""
    is_end: bool
    words: "Future[list[str]]"


class Translations:
    """All streams of one model, stepped by one thread.

    Args:
        trained: the model of a run, or an exported one.
        name: of the run.
        policy: when to write, unless a client says.
        reset: states after which a sentence is taken for ended; None for never.
        max_streams: that may be open at once.
    """

    def __init__(
        self,
        trained: Trained,
        name: str,
        *,
        policy: str = "wait-3",
        reset: int | None = 200,
        max_streams: int = 64,
    ) -> None:
        self.trained, self.name = trained, name
        self.policy, self.reset, self.max_streams = policy, reset, max_streams
        self.n_streams = 0
        self._interpreters: dict[str, Interpreter] = {}
        self._pushes: queue.SimpleQueue[Push | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="leap-streams", daemon=True)
        self.interpreter(policy)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def stop(self) -> None:
        """End, after what has come by now."""
        self._pushes.put(None)
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether it works."""
        return self._thread.is_alive()

    def interpreter(self, policy: str) -> Interpreter:
        """The model with a policy."""
        if policy not in self._interpreters:
            reset = None if policy == "offline" and self.trained.extractor else self.reset
            made = self.trained.interpreter(policy, reset=reset)
            while len(self._interpreters) >= MOST_POLICIES:
                self._interpreters.pop(next(iter(self._interpreters)))
            self._interpreters[policy] = made
        return self._interpreters[policy]

    def push(self, push: Push) -> None:
        """Take something that has come."""
        self._pushes.put(push)

    async def serve(self, socket: WebSocket, seconds: float) -> None:
        """Translate for one client, until it leaves or says nothing for so long."""
        await socket.accept()
        if self.n_streams >= self.max_streams:
            await _tell(socket, "error", message="too many streams are open; try again later")
            await socket.close(TRY_LATER)
            return
        self.n_streams += 1
        try:
            await self._converse(socket, seconds)
        except WebSocketDisconnect:
            pass  # Nothing of it is left but the stream, which goes with the session.
        finally:
            self.n_streams -= 1

    async def _converse(self, socket: WebSocket, seconds: float) -> None:
        session = Session(self, socket)
        while True:
            try:
                message = await asyncio.wait_for(socket.receive(), seconds)
            except TimeoutError:
                await _tell(socket, "error", message=f"nothing came for {seconds:g} s")
                await socket.close(NO_POLICY)
                return
            if message["type"] == "websocket.disconnect":
                return
            try:
                await session.take(message)
            except LeapError as error:
                await _tell(socket, "error", message=str(error))

    def _run(self) -> None:
        while True:
            batch = [self._pushes.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    batch.append(self._pushes.get_nowait())
            together: dict[int, list[Push]] = defaultdict(list)
            for push in batch:
                if push is not None:
                    together[id(push.session.stream._pool.interpreter)].append(push)
            for pushes in together.values():
                self._step(pushes)
            if None in batch:
                return

    def _step(self, pushes: list[Push]) -> None:
        """Give all of these streams what has come, as one batch if their states allow it."""
        if len(pushes) > 1 and not pushes[0].session.stream._pool.interpreter.can_join:
            for push in pushes:
                self._step([push])
            return
        try:
            pool = StreamPool.join([push.session.stream for push in pushes])
            words = pool.push([push.source for push in pushes])
            ended = [i for i, push in enumerate(pushes) if push.is_end]
            if ended:
                more = pool.finish(ended)
                words = [x + y for x, y in zip(words, more, strict=True)]
            for push, stream, new in zip(pushes, pool.split(), words, strict=True):
                push.session.stream = stream
                push.words.set_result(new)
        except LeapError as error:
            if len(pushes) > 1:  # Which of them it is shows one by one; none has read anything yet.
                for push in pushes:
                    self._step([push])
            else:
                pushes[0].words.set_exception(error)
        except Exception:
            for push in pushes:
                push.words.set_exception(ApiError("the model could not go on with this stream"))


class Session:
    """What one client has said."""

    def __init__(self, translations: Translations, socket: WebSocket) -> None:
        self.translations, self.socket = translations, socket
        self.stream: Stream = translations.interpreter(translations.policy).stream()
        self.extractor = translations.trained.extractor
        self.policy = translations.policy
        self.rate = None if self.extractor is None else self.extractor.sampling_rate
        self.resampler: Resampler | None = None
        self.rest = b""
        """Half a sample, whose other half is still to come."""
        self.n_words = 0
        self.is_begun = False

    async def take(self, message: Any) -> None:
        """Do what a message asks for."""
        sound = message.get("bytes")
        if sound is not None:
            await self._push(self._samples(sound))
            return
        asked = _read(message.get("text") or "")
        kind = asked.get("type")
        if kind == "start":
            await self._start(asked)
        elif kind == "text":
            text = asked.get("text")
            if not isinstance(text, str):
                raise ApiError("a message of type text has its words in 'text'")
            if self.extractor is not None:
                raise ApiError("this model translates speech; send 16-bit PCM in binary messages")
            await self._push(text.encode("utf-8", "replace").decode())
        elif kind == "end":
            await self._push(self._samples(b"", last=True) if self.extractor else None, end=True)
            await _tell(self.socket, "end", words=self.n_words)
            self.n_words, self.rest, self.resampler, self.is_begun = 0, b"", None, False
        else:
            raise ApiError(f"there is no message of type {kind!r:.40}; send start, text or end")

    async def _start(self, asked: dict[str, Any]) -> None:
        if self.is_begun:
            raise ApiError("start comes before anything else of a stream; send end first")
        policy, rate = asked.get("policy", self.policy), asked.get("sample_rate", self.rate)
        if not isinstance(policy, str):
            raise ApiError("policy must be text, as wait-3")
        if self.extractor is None and rate is not None:
            raise ApiError("this model translates text, which has no sample_rate; drop it")
        if self.extractor is not None and (type(rate) is not int or not SLOWEST <= rate <= FASTEST):
            raise ApiError(f"sample_rate={rate!r:.40} must be from {SLOWEST} to {FASTEST}")
        made = await asyncio.to_thread(self.translations.interpreter, policy)
        self.stream, self.policy, self.rate = made.stream(), policy, rate
        source = "text" if self.extractor is None else "speech"
        await _tell(self.socket, "ready", source=source, policy=policy, sample_rate=rate)

    async def _push(self, source: Any, *, end: bool = False) -> None:
        words: Future[list[str]] = Future()
        self.translations.push(Push(self, source, end, words))
        found = await asyncio.wrap_future(words)
        self.is_begun = True
        self.n_words += len(found)
        if found:
            await _tell(self.socket, "words", words=found)

    def _samples(self, sound: bytes, *, last: bool = False) -> Any:
        """Samples from -1 to 1 at the model's rate."""
        if self.extractor is None or self.rate is None:
            raise ApiError("this model translates text; send {'type': 'text', 'text': 'A man '}")
        sound = self.rest + sound
        whole = len(sound) // 2 * 2
        self.rest = sound[whole:]
        samples = np.frombuffer(sound[:whole], "<i2").astype(np.float32) / 32768
        if self.resampler is None:
            self.resampler = Resampler(self.rate, self.extractor.sampling_rate)
        return self.resampler.push(samples, last=last)


def _read(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ApiError("the message is no JSON; send {'type': 'text', 'text': 'A man '}") from error
    if not isinstance(found, dict):
        raise ApiError("the message is no object of JSON; send {'type': 'text', 'text': 'A man '}")
    return found


async def _tell(socket: WebSocket, kind: str, **rest: Any) -> None:
    await socket.send_text(json.dumps({"type": kind, **rest}))
