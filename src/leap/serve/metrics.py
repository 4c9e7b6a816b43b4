"""What the server does, as Prometheus reads it."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from leap.serve.engine import Done, Engine, Failed, Job, Watch

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
STEPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics(Watch):
    """Counters of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.replies = Counter(
            "leap_replies", "Replies that have ended, by how.", ["reason"], registry=registry
        )
        self.prompt_tokens = Counter("leap_prompt_tokens", "Tokens of prompts.", registry=registry)
        self.shared_tokens = Counter(
            "leap_shared_tokens", "Those of them that another text had read.", registry=registry
        )
        self.written_tokens = Counter(
            "leap_written_tokens", "Tokens of replies.", registry=registry
        )
        self.first = Histogram(
            "leap_first_token_seconds",
            "From a request to its first token.",
            buckets=SECONDS,
            registry=registry,
        )
        self.whole = Histogram(
            "leap_reply_seconds",
            "From a request to the end of its reply.",
            buckets=SECONDS,
            registry=registry,
        )
        self.step = Histogram(
            "leap_step_seconds", "One token in every row.", buckets=STEPS, registry=registry
        )
        self.refused = Counter(
            "leap_refused", "Requests that were refused, by status.", ["status"], registry=registry
        )
        self.streams = Gauge(
            "leap_streams", "Translation streams that are open.", registry=registry
        )

    def follow(self, engine: Engine) -> None:
        """Count what an engine does, and tell of its slots and states."""
        engine.watch = self
        for name, about, value in (
            ("leap_running", "Slots that are taken.", lambda: engine.n_running),
            ("leap_waiting", "Requests that wait for a slot.", lambda: engine.n_waiting),
            ("leap_states", "States that are kept.", lambda: len(engine.states)),
            ("leap_state_bytes", "Memory of states.", lambda: engine.states.n_bytes),
            ("leap_prefix_bytes", "Memory of prefixes.", lambda: engine.prefixes.n_bytes),
        ):
            Gauge(name, about, registry=self.registry).set_function(value)

    def read(self, n_tokens: int, n_shared: int) -> None:
        """A prompt was read."""
        self.prompt_tokens.inc(n_tokens)
        self.shared_tokens.inc(n_shared)

    def stepped(self, n_rows: int, seconds: float) -> None:
        """A step was taken."""
        self.step.observe(seconds)

    def ended(self, job: Job, event: Done | Failed) -> None:
        """A reply has ended."""
        self.replies.labels("failed" if isinstance(event, Failed) else event.reason).inc()
        self.written_tokens.inc(len(job.written))
        if job.first is not None:
            self.first.observe(job.first - job.began)
        self.whole.observe(time.monotonic() - job.began)

    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self.registry)
