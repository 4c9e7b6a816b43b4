"""Tiny models, trained on nothing, with opinions, and engines to serve them."""

import contextlib
import functools
import socket
import threading
import time
from queue import Queue

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from leap.models import LeapConfig, LeapForCausalLM, LeapformerConfig, LeapformerForCausalLM
from leap.serve.engine import Done, Engine, Job, Piece
from leap.serve.models import KeyValueModel, StateModel
from leap.serve.sampling import Sampling
from leap.serve.text import Text
from leap.tasks.lm.tokenizer import byte_tokenizer

KINDS = {
    "leapformer": {},
    "leap": {"leap": True, "position_embedding": "none"},
    "learned": {"position_embedding": "learned"},
    "travelled": {
        "proportion": "travelled",
        "gate": "head",
        "convolution": 4,
        "position_embedding": "none",
    },
    "hybrid": {
        "attention": ["leap", "gated-delta", "softmax"],
        "window_sizes": [4, None, None],
        "n_layer": 3,
        "position_embedding": "none",
    },
    "gpt2": {},
}


def _build(kind="leapformer"):
    """A model of 257 tokens by the engine's protocol, in double precision."""
    sizes = {"vocab_size": 257, "hidden_size": 16, "n_layer": 2, "n_head": 2, "n_positions": 512}
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes["n_embd"] = sizes.pop("hidden_size")
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=256, eos_token_id=256))
    else:
        options = sizes | {"hidden_dropout_prob": 0.0, "eos_token_id": 256} | KINDS[kind]
        if options.pop("leap", False):
            model = LeapForCausalLM(LeapConfig(**options))
        else:
            model = LeapformerForCausalLM(LeapformerConfig(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    served = KeyValueModel if kind == "gpt2" else StateModel
    return served(model.double().eval(), byte_tokenizer(), kind)


class Reply:
    """Gathers what an engine delivers."""

    def __init__(self):
        self.events = Queue()
        self.pieces = []

    def wait(self):
        """The event that ends it."""
        while True:
            event = self.events.get(timeout=120)
            if not isinstance(event, Piece):
                return event
            self.pieces.append(event)

    @property
    def text(self):
        return "".join(piece.text for piece in self.pieces)


def _ask(engine, prompt="", *, after=None, stops=(), submit=True, **settings):
    """A reply to be waited for."""
    model, reply = engine.model, Reply()
    kept = None if after is None else engine.states.get(after)
    before = model.begin() if kept is None else list(kept.tail[-1:])
    tokens = [*before, *model.encode(prompt)]
    sampling = {k: settings.pop(k) for k in ("temperature", "top_p", "seed") if k in settings}
    reply.job = Job(
        tokens=tokens,
        text=Text(model.speller(prompt, tokens), stops),
        deliver=reply.events.put,
        sampling=Sampling(**{"temperature": 0.0} | sampling),
        after=after,
        **settings,
    )
    if submit:
        engine.submit(reply.job)
    return reply


def _told(reply):
    """All that a reply says, once it has ended."""
    done = reply.wait()
    assert isinstance(done, Done), done
    return reply.text, done.reason, reply.job.written


@pytest.fixture
def engine_of():
    """Makes engines, and ends them."""
    with contextlib.ExitStack() as stack:

        def make(model, **settings):
            engine = Engine(model, **settings)
            engine.start()
            stack.callback(engine.stop)
            return engine

        yield make


@pytest.fixture(scope="session", params=KINDS)
def served(request):
    """Each kind of model in turn."""
    return _build(request.param)


@pytest.fixture(scope="session")
def build():
    """Makes a model of a certain kind."""
    return functools.cache(_build)


@pytest.fixture(scope="session")
def ask():
    """Asks an engine for a reply."""
    return _ask


@pytest.fixture(scope="session")
def told():
    """Waits for a reply: text, reason, tokens."""
    return _told


class Live:
    """A server that really listens, on a free port."""

    def __init__(self, app):
        uvicorn = pytest.importorskip("uvicorn", reason="the extra serve is not installed")
        self.app = app
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        settings = uvicorn.Config(
            app, log_level="error", ws="websockets-sansio", timeout_graceful_shutdown=20
        )
        self.server = uvicorn.Server(settings)
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],))
        self.thread.start()
        while not self.server.started:
            time.sleep(0.005)

    def stop(self):
        self.server.should_exit = True
        self.thread.join(60)
        self.socket.close()


@pytest.fixture
def live():
    """Makes servers of applications, and ends them."""
    with contextlib.ExitStack() as stack:

        def make(app):
            made = Live(app)
            stack.callback(made.stop)
            return made

        yield make
