"""The page and the application that serves it, which keeps to this machine and to its bounds."""

import ipaddress
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # Before gradio is imported: it asks then.

import gradio as gr
from fastapi import FastAPI
from starlette.middleware.trustedhost import TrustedHostMiddleware

from leap.app import compare, explain, interpret, write
from leap.app.config import AppConfig
from leap.app.looks import CSS
from leap.app.models import Opened

MIB = 2**20
BODY = MIB
"""Bytes of a request that is no upload."""
POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; "
    "frame-ancestors 'none'; form-action 'self'; base-uri 'self'"
)
"""What browsers hold the page to: nothing from another server, whatever gradio would ask for."""
FONTS = ("system-ui", "sans-serif")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def build(models: Sequence[Opened], config: AppConfig) -> gr.Blocks:
    """The page."""
    with gr.Blocks(title="leapformer", analytics_enabled=False, delete_cache=(600, 3600)) as page:
        names = ", ".join(f"{model.name} ({_kind(model)})" for model in models)
        gr.Markdown(f"## leapformer\n{names}")
        with gr.Tabs():
            with gr.Tab("Write"):
                write.tab(models, config)
            with gr.Tab("Explain"):
                explain.tab(models, config)
            with gr.Tab("Interpret"):
                interpret.tab(models, config)
            with gr.Tab("Compare"):
                compare.tab(config)
    page.queue(max_size=config.waiting, default_concurrency_limit=config.at_once)
    return page


def _kind(model: Opened) -> str:
    does = {"lm": "writes", "classifier": "classifies", "text": "translates text"}
    return does.get(model.kind, "translates speech") + ", exported" * model.is_exported


@contextmanager
def application(models: Sequence[Opened], config: AppConfig) -> Iterator[Any]:
    """The ASGI application, with a folder for uploads that goes with it."""
    usual = os.environ.get("GRADIO_TEMP_DIR")
    with tempfile.TemporaryDirectory(prefix="leap-app-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder
        try:
            yield _mounted(models, config)
        finally:
            os.environ.pop("GRADIO_TEMP_DIR")
            if usual is not None:
                os.environ["GRADIO_TEMP_DIR"] = usual


def _mounted(models: Sequence[Opened], config: AppConfig) -> Any:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    if _is_local(config.host):
        # Else a page elsewhere could call itself by this machine's address.
        app.add_middleware(
            TrustedHostMiddleware, allowed_hosts=["localhost", "127.0.0.1", "[::1]", config.host]
        )
    gr.mount_gradio_app(
        app,
        build(models, config),
        path="/",
        server_name=config.host,
        server_port=config.port,
        max_file_size=config.max_upload * MIB,
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        show_error=True,
        theme=gr.themes.Default(font=FONTS, font_mono=("ui-monospace", "monospace")),
        css=CSS,
    )
    return Bounded(app, config.max_upload * MIB + BODY)


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Bounded:
    """An application whose requests have bodies of bounded size, and whose pages keep to it.

    Args:
        app: the application.
        largest: bytes of an upload.
    """

    def __init__(self, app: Any, largest: int) -> None:
        self.app, self.largest = app, largest

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        most = self.largest if scope["path"].endswith("/upload") else BODY
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > most:
            await _refuse(send, most)
            return
        n_bytes = 0

        async def counted() -> Message:
            nonlocal n_bytes
            message = await receive()
            n_bytes += len(message.get("body", b""))
            if n_bytes > most:  # Sent in chunks, without a length.
                return {"type": "http.disconnect"}
            return message

        async def kept_here(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [
                    (b"content-security-policy", POLICY.encode()),
                    (b"x-content-type-options", b"nosniff"),
                    (b"referrer-policy", b"no-referrer"),
                ]
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        await self.app(scope, counted, kept_here)


async def _refuse(send: Send, most: int) -> None:
    said = f"this is larger than the {most // MIB} MiB that the page takes".encode()
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(said)).encode())]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": said})
