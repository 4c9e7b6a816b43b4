"""The HTTP interface: OpenAI's completions, states to go on from, translation streams, metrics."""

import asyncio
import contextlib
import hmac
import json
import re
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from leap.errors import LeapError
from leap.serve.completions import (
    Asked,
    Choice,
    Limits,
    completion,
    read_request,
    usage,
)
from leap.serve.engine import Busy, Done, Engine, Event, Failed, Job, Piece
from leap.serve.errors import ApiError
from leap.serve.metrics import Metrics
from leap.serve.protocol import Kept
from leap.serve.text import Text

MIB = 2**20
PROMPT_TAIL = 16
"""Tokens before a reply that are decoded with it, for its first spaces and characters."""
OPEN = ("/healthz",)
"""What is told without a token."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Who may ask for what."""

    limits: Limits = field(default_factory=Limits)
    max_body: int = MIB
    """Bytes of a request's body."""
    seconds: float = 300.0
    """How long a reply may take, waiting included; how long a stream may say nothing."""
    token: str | None = None
    """Bearer token that requests must have; None for none."""
    folder: Path | None = None
    """Where states are saved; None for nowhere."""


def make_app(
    *,
    engine: Engine | None = None,
    translations: Any = None,
    access: Access | None = None,
) -> FastAPI:
    """The application over an engine or over `leap.serve.translate.Translations`.

    It starts and stops what it is over.
    """
    access = access or Access()
    metrics = Metrics()
    worker: Any = translations if engine is None else engine
    name = translations.name if engine is None else engine.model.name

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await asyncio.to_thread(worker.stop)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.engine = engine
    app.add_middleware(Guard, token=access.token)
    _add_errors(app, metrics)

    @app.get("/healthz")
    async def healthz() -> JSONResponse:
        is_well = worker.is_alive
        return JSONResponse({"status": "ok" if is_well else "failed"}, 200 if is_well else 503)

    @app.get("/metrics")
    async def tell_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(name)]}

    @app.get("/v1/models/{asked}")
    async def model(asked: str) -> dict[str, Any]:
        _check_model(asked, name)
        return _model(name)

    if engine is not None:
        metrics.follow(engine)
        _add_completions(app, engine, access)
        _add_states(app, engine, access)
    else:

        @app.websocket("/v1/translations")
        async def translate(socket: WebSocket) -> None:
            with metrics.streams.track_inprogress():
                await translations.serve(socket, access.seconds)

    return app


class Guard:
    """Lets in who has the token, and no page of another site that a browser happens to show."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self.app = app
        self.expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on, or answer in its place."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        error = self._refusal(scope)
        if error is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": str(error)})
        else:
            await JSONResponse(error.body, error.status)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = dict(scope["headers"])
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and urlsplit(origin).netloc != headers.get(b"host", b"").decode("latin-1"):
            return ApiError(
                "pages of another origin may not use this server", status=403, code="origin"
            )
        given = headers.get(b"authorization", b"")
        if (
            self.expected is not None
            and scope["path"] not in OPEN
            and not hmac.compare_digest(given, self.expected)
        ):
            return ApiError(
                "this server wants its token: Authorization: Bearer TOKEN",
                status=401,
                code="invalid_api_key",
            )
        return None


def _add_errors(app: FastAPI, metrics: Metrics) -> None:
    def answer(error: ApiError) -> JSONResponse:
        metrics.refused.labels(str(error.status)).inc()
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(LeapError)
    async def ours(_: Request, error: Exception) -> JSONResponse:
        if isinstance(error, Busy):
            error = ApiError(str(error), status=429, code="busy", seconds=error.seconds)
        return answer(error if isinstance(error, ApiError) else ApiError(str(error)))

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code == 404:
            message = f"there is nothing at {request.url.path}; completions are at /v1/completions"
        elif error.status_code == 405:
            message = f"{request.method} is not possible at {request.url.path}"
        return answer(ApiError(message, status=error.status_code))

    @app.exception_handler(Exception)
    async def unforeseen(_: Request, error: Exception) -> JSONResponse:
        return answer(ApiError("the server has failed; its log says why", status=500))


async def read_json(request: Request, limit: int) -> Any:
    """The body of a request."""
    too_large = ApiError(
        f"the body is larger than the {limit} bytes that this server takes; send less",
        status=413,
        code="body_too_large",
    )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise too_large
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        said = str(error).partition("\n")[0]
        raise ApiError(f"the body is no JSON ({said:.80}); send an object of JSON") from error


def _add_completions(app: FastAPI, engine: Engine, access: Access) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        asked = read_request(await read_json(request, access.max_body), access.limits)
        if asked.model is not None:
            _check_model(asked.model, engine.model.name)
        events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        jobs = await _jobs(engine, asked, access, events)
        engine.submit(*jobs)
        reply = Replying(request, engine, asked, jobs, events)
        if asked.stream:
            return await reply.streamed()
        return await reply.whole()


async def _jobs(
    engine: Engine, asked: Asked, access: Access, events: "asyncio.Queue[tuple[int, Event]]"
) -> list[Job]:
    loop, model = asyncio.get_running_loop(), engine.model
    kept = None
    if asked.state is not None:
        kept = _kept(engine, asked.state)
    jobs: list[Job] = []
    for prompt in asked.prompts:
        tokens = await _tokens(engine, prompt, access.limits.max_prompt)
        before = model.begin() if kept is None else [kept.tail[-1]]
        to_read = [*before, *tokens]
        n_read = 0 if kept is None else kept.n_read
        if model.max_length is not None and (
            n_read + len(to_read) + asked.max_tokens - 1 > model.max_length
        ):
            raise ApiError(
                f"{n_read + len(to_read)} tokens read and max_tokens={asked.max_tokens} to write "
                f"are more than the {model.max_length} positions this model has learned; ask for "
                "less",
                code="context_length_exceeded",
                param="max_tokens",
            )
        tail = [*(kept.tail[:-1] if kept is not None else ()), *to_read][-PROMPT_TAIL:]
        for _ in range(asked.n):
            index = len(jobs)

            def deliver(event: Event, index: int = index) -> None:
                loop.call_soon_threadsafe(events.put_nowait, (index, event))

            text = prompt if isinstance(prompt, str) else ""
            jobs.append(
                Job(
                    tokens=to_read,
                    text=Text(model.speller(text, tail), asked.stops),
                    deliver=deliver,
                    sampling=asked.sampling,
                    max_tokens=asked.max_tokens,
                    after=asked.state,
                    log_probabilities=asked.log_probabilities,
                    seconds=access.seconds,
                )
            )
    return jobs


async def _tokens(engine: Engine, prompt: str | list[int], limit: int) -> list[int]:
    """Tokens of a prompt, all of them there are."""
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ApiError(
                f"prompt holds half a character at {error.start}; send text in UTF-8",
                param="prompt",
            ) from error
        tokens = await asyncio.to_thread(engine.model.encode, prompt)
    else:
        tokens = prompt
        for token in tokens:
            if not 0 <= token < engine.model.vocab_size:
                raise ApiError(
                    f"prompt has the token {token!r:.40}, and there are those from 0 to "
                    f"{engine.model.vocab_size - 1}",
                    param="prompt",
                )
    if len(tokens) > limit:
        raise ApiError(
            f"a prompt of {len(tokens)} tokens is longer than the {limit} that this server "
            "takes; send less at once, and go on from the reply's state",
            code="context_length_exceeded",
            param="prompt",
        )
    return tokens


class Replying:
    """A request while its replies are written; if the client vanishes, so do they."""

    def __init__(
        self,
        request: Request,
        engine: Engine,
        asked: Asked,
        jobs: Sequence[Job],
        events: "asyncio.Queue[tuple[int, Event]]",
    ) -> None:
        self.request, self.engine, self.asked = request, engine, asked
        self.jobs, self.events = jobs, events
        self.name = f"cmpl-{secrets.token_hex(12)}"
        self.choices = [Choice(index) for index in range(len(jobs))]
        self.gone = asyncio.create_task(self._gone())

    async def whole(self) -> Response:
        """All replies at once."""
        try:
            async for _ in self._arriving():
                pass
        finally:
            self._leave()
        forms = [choice.form(self._spell) for choice in self.choices]
        return JSONResponse(completion(self.name, self.engine.model.name, forms, self._usage()))

    async def streamed(self) -> Response:
        """Replies as server-sent events, once there is anything to send."""
        arriving = self._arriving()
        try:
            first = await anext(arriving)
        except BaseException:
            self._leave()
            raise

        async def events() -> AsyncIterator[str]:
            try:
                yield self._event([first.form(self._spell)])
                async for choice in arriving:
                    yield self._event([choice.form(self._spell)])
                if self.asked.usage_in_stream:
                    yield self._event([], self._usage())
                yield "data: [DONE]\n\n"
            except ApiError as error:
                yield f"data: {json.dumps(error.body)}\n\n"
            finally:
                self._leave()

        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(events(), media_type="text/event-stream", headers=headers)

    async def _arriving(self) -> AsyncIterator[Choice]:
        """What is new of a choice, again and again; the whole of it is gathered meanwhile."""
        n_open = len(self.jobs)
        while n_open:
            index, event = await self.events.get()
            choice, new = self.choices[index], Choice(index)
            if isinstance(event, Failed):
                status = 503 if event.is_late else 500
                seconds = self.engine.retry_after if event.is_late else None
                raise ApiError(event.message, status=status, seconds=seconds)
            if isinstance(event, Piece):
                new.text = event.text
                choice.text += event.text
                if event.chosen is not None:
                    new.chosen = [event.chosen]
                    choice.chosen.append(event.chosen)
            else:
                new.done = choice.done = event
                n_open -= 1
            yield new

    async def _gone(self) -> None:
        """Wait until the client vanishes."""
        while (await self.request.receive())["type"] != "http.disconnect":
            pass
        for job in self.jobs:
            job.cancel()

    def _leave(self) -> None:
        self.gone.cancel()
        for job in self.jobs:
            job.cancel()

    def _event(self, forms: list[dict[str, Any]], used: dict[str, Any] | None = None) -> str:
        form = completion(self.name, self.engine.model.name, forms, used)
        return f"data: {json.dumps(form)}\n\n"

    def _usage(self) -> dict[str, Any]:
        return usage([choice.done for choice in self.choices if isinstance(choice.done, Done)])

    def _spell(self, token: int) -> str:
        return self.engine.model.speller("", [])(token) or f"<{token}>"


def _add_states(app: FastAPI, engine: Engine, access: Access) -> None:
    def told(name: str | None, kept: Kept) -> dict[str, Any]:
        if name is None:
            raise ApiError("there is no room to keep this state", status=507)
        n_bytes = engine.model.n_bytes(kept.state)
        return {"id": name, "object": "state", "tokens": kept.n_read, "bytes": n_bytes}

    def path_of(body: Any) -> Path:
        if access.folder is None:
            raise ApiError("this server saves no states; start it with --states FOLDER")
        name = body.get("name") if isinstance(body, dict) else None
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name):
            raise ApiError(
                "name must be letters, digits, - and _, at most 64 of them: {'name': 'tale'}",
                param="name",
            )
        return access.folder / f"{name}.safetensors"

    @app.post("/v1/states/load")
    async def load(request: Request) -> dict[str, Any]:
        path = path_of(await read_json(request, access.max_body))
        if not path.is_file():
            raise ApiError(f"no state was saved as {path.stem}", status=404, code="not_found")
        kept = await asyncio.to_thread(engine.model.load, path)
        return told(engine.keep(kept), kept)

    @app.get("/v1/states/{name}")
    async def show(name: str) -> dict[str, Any]:
        return told(name, _kept(engine, name))

    @app.delete("/v1/states/{name}")
    async def drop(name: str) -> dict[str, Any]:
        _kept(engine, name)
        engine.states.drop(name)
        return {"id": name, "object": "state", "deleted": True}

    @app.post("/v1/states/{name}/fork")
    async def fork(name: str) -> dict[str, Any]:
        kept = _kept(engine, name)
        return told(engine.keep(kept), kept)

    @app.post("/v1/states/{name}/save")
    async def save(name: str, request: Request) -> dict[str, Any]:
        kept = _kept(engine, name)
        path = path_of(await read_json(request, access.max_body))
        await asyncio.to_thread(engine.model.save, kept, path)
        return told(name, kept) | {"name": path.stem}


def _kept(engine: Engine, name: str) -> Kept:
    kept = engine.states.get(name)
    if kept is None:
        raise ApiError(
            f"there is no state {name!r:.60}, or it has given way to newer ones; send the whole "
            "text",
            status=404,
            code="state_not_found",
            param="state",
        )
    return kept


def _check_model(asked: str, own: str) -> None:
    if asked != own:
        raise ApiError(
            f"there is no model {asked!r:.60}; this server has {own!r}",
            status=404,
            code="model_not_found",
            param="model",
        )


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "leap"}
