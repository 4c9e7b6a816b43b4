"""Streams of a translation model in torch; what they do is in `leap.runtime.streaming`.

interpreter = Interpreter(model, vocabulary, WaitK(3))
stream = interpreter.stream()
stream.push("A man in")        # the words that can be said by now
stream.finish()                # all the others; the stream is then as new
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from leap.errors import ConfigError, FileError
from leap.layers.attention import DotProductAttention
from leap.models.fbank import LeapformerFeatureExtractor
from leap.models.states import States
from leap.ops.state import State, accumulator, load_states, save_states, state
from leap.reports.files import read_json
from leap.runtime.streaming.pauses import Pauses
from leap.runtime.streaming.policies import Offline, Policy, read_policy
from leap.runtime.streaming.stream import Interpreter as AnyInterpreter
from leap.runtime.streaming.stream import Stream, StreamPool
from leap.runtime.streaming.vocabulary import BOS
from leap.tasks.files import reading_model
from leap.tasks.simul.model import Translator, load_run
from leap.tasks.simul.paths import Paths, Resolved
from leap.tasks.simul.vocabulary import Vocabulary


@state
class Kept(State):
    """What a stream keeps besides the model's states, for a file."""

    counts: Tensor
    held: Tensor
    drafts: Tensor
    pieces: Tensor | None = None
    begun: Tensor | None = None
    last: Tensor | None = None
    source_count: Tensor | None = None
    frames: Tensor | None = None
    rest: Tensor | None = None
    quiet: Tensor | None = None
    memory: Tensor | None = None
    sound: Tensor | None = None
    voices: Tensor | None = None


class Interpreter(AnyInterpreter):
    """A model in torch with a policy.

    Args:
        model: of text or of speech.
        vocabulary, policy, extractor, chunk_size, longest, reset, beam, language, pauses: see
            `leap.runtime.streaming.stream.Interpreter`.
    """

    def __init__(
        self,
        model: Translator,
        vocabulary: Vocabulary,
        policy: Policy,
        *,
        extractor: LeapformerFeatureExtractor | None = None,
        **options: Any,
    ) -> None:
        is_speech = model.main_input_name == "input_features"
        if is_speech and extractor is None:
            raise ConfigError("a model of speech needs the extractor that makes frames of sound")
        vocabulary.check_fits(model.config.vocab_size, "the model")
        start = model.config.decoder_start_token_id
        super().__init__(
            vocabulary,
            policy,
            start=BOS if start is None else start,
            extractor=extractor if is_speech else None,
            frames_per_state=model.config.frames_per_state if is_speech else 1,
            **options,
        )
        self.model = model.eval()
        cross: Any = model.get_decoder().layers[-1].cross_attention
        if policy.window and not isinstance(cross, DotProductAttention):
            raise ConfigError(f"{policy.name} needs a cross-attention whose weights are known")
        window, too_new = getattr(cross, "window", None), self.chunk_size * policy.too_new
        if window is not None and policy.too_new and window <= too_new:
            raise ConfigError(
                f"{policy.name} trusts nothing of the last {too_new} source states, and the model "
                f"sees no more than cross_window={window}; it would write nothing before the end"
            )
        self.blank = self._blank()

    @torch.no_grad()
    def read(self, chunk: np.ndarray, states: States) -> States:
        """Read one more chunk, and remember what had been read before, if the policy looks back."""
        given = torch.from_numpy(chunk).to(self.model.device)
        after = self.model.read(
            given.to(self.model.dtype) if given.is_floating_point() else given, states
        )
        if not self.policy.window:
            return after
        earlier: Any = states.of("cross")[-1]
        return after.with_part("before", [earlier.without_values(), *states.of("before")[:-1]])

    @torch.no_grad()
    def logits(
        self, tokens: np.ndarray, states: States
    ) -> tuple[Float[np.ndarray, "b v"], States, Float[np.ndarray, "b n"] | None]:
        """Write tokens `[b, t]`: logits of what follows the last, states, attention before."""
        given = torch.from_numpy(tokens).to(self.model.device)
        logits, after, shares = self.model.write_with_shares(given, states, states.of("before"))
        before = None if shares is None else _array(shares.mean(dim=1)[:, -1])  # over the heads
        return _array(logits[:, -1]), after, before

    def save(self, path: str | Path, states: States, kept: Mapping[str, np.ndarray]) -> None:
        """Write a stream to a safetensors file."""
        tensors = {name: torch.from_numpy(x.copy()) for name, x in kept.items()}
        save_states(path, {**states.by_name, "stream": Kept(**tensors)})

    def load(self, path: str | Path) -> Stream:
        """The stream that `Stream.save` wrote, to be gone on with."""
        states = load_states(path, self.model.device)
        kept = states.pop("stream", None)
        found = States(states)
        if not isinstance(kept, Kept) or found.layout() != self.blank.layout():
            raise FileError(f"{path} holds no stream of this model and policy")
        row = self.row()
        if (kept.frames is None) != (self.extractor is None):
            raise FileError(f"{path} holds no stream of this kind of source")
        row.restore({name: x.cpu().numpy() for name, x in kept.tensors().items()})
        return Stream(StreamPool(self, [row], found))

    @torch.no_grad()
    def _blank(self) -> States:
        """What the model keeps of nothing, in one row."""
        model, device = self.model, self.model.device
        nothing = torch.zeros(1, 0, dtype=torch.long, device=device)
        source = nothing
        if self.extractor is not None:
            source = torch.zeros(1, 0, self.extractor.feature_size, device=device)
            source = source.to(model.dtype)
        states = model.write(nothing, model.read(source))[1]
        if self.policy.window:
            earlier: Any = states.of("cross")[-1]
            states = states.with_part("before", [earlier.without_values()] * self.policy.window)
        return states


def _array(x: Tensor) -> np.ndarray:
    return x.to(accumulator(x)).cpu().numpy()


@dataclass(frozen=True)
class Trained:
    """What a run has left: a model, and how it learnt to read."""

    model: Translator
    vocabulary: Vocabulary
    extractor: LeapformerFeatureExtractor | None
    paths: Resolved

    def interpreter(
        self,
        policy: str | Policy,
        *,
        chunk_size: int | None = None,
        longest: float = 2.0,
        reset: int | None = None,
        beam: int = 1,
        pauses: Pauses = "loudness",
    ) -> Interpreter:
        """The model with a policy.

        Args:
            policy: or its name, where a wait has the ratio of the training, unless it says.
            chunk_size: states that are read at once, 0 for all; by default the fewest of the
                training, offline the most.
            longest, reset, beam, pauses: see `Interpreter`.
        """
        if isinstance(policy, str):
            policy = read_policy(policy, self.paths.ratio)
        if chunk_size is None:
            choose = max if isinstance(policy, Offline) else min
            chunk_size = choose(self.paths.chunk_sizes, key=lambda size: size or math.inf)
        return Interpreter(
            self.model,
            self.vocabulary,
            policy,
            extractor=self.extractor,
            chunk_size=chunk_size,
            longest=longest,
            reset=reset,
            beam=beam,
            language=getattr(self.model.config, "source_language", "en"),
            pauses=pauses,
        )


def load_trained(run: Path) -> Trained:
    """The model of a run folder, or of the folder of its model."""
    model, vocabulary = load_run(run)
    folder = run / "model" if (run / "model").is_dir() else run
    extractor = None
    if model.main_input_name == "input_features":
        with reading_model(folder):
            extractor = LeapformerFeatureExtractor.from_pretrained(str(folder))
    settings = folder.parent / "config.json"
    has_settings = folder.name == "model" and settings.is_file()
    found = read_json(settings) if has_settings else {}
    with reading_model(folder.parent):
        paths = Paths(ratio=found.get("ratio"), chunk_sizes=found.get("chunk_sizes"))
        resolved = paths.resolved(is_speech=extractor is not None)
    return Trained(model, vocabulary, extractor, resolved)
