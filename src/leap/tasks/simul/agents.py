"""Agents for SimulEval 1.1.4, which has to be installed apart from us (see the guide):

    simuleval --agent-class leap.tasks.simul.agents.TextAgent --run runs/captions --policy wait-3
        --source test.source --target test.target --output runs/scores --quality-metrics BLEU
        --latency-metrics LAAL AL DAL AP

and `SpeechAgent` with `--source-segment-size 320`, a list of wav files, and the like. All work is
done as the source comes in, so that nothing is kept of it, and what is left at the end comes in one
subword, as SimulEval asks no further of an agent of speech.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import numpy as np

from leap.errors import ConfigError
from leap.tasks.simul.audio.files import Resampler
from leap.tasks.simul.streaming.stream import Interpreter, load_trained

try:
    from simuleval.agents import AgentStates, SpeechToTextAgent, TextToTextAgent
    from simuleval.agents.actions import Action, ReadAction, WriteAction
    from simuleval.data.segments import EmptySegment, Segment, SpeechSegment
except ImportError as error:
    raise ConfigError(
        "SimulEval is not installed: pip install --no-deps simuleval==1.1.4, then pip install "
        "'sacrebleu>=2.5' pandas pyyaml soundfile textgrid tqdm tornado requests"
    ) from error


class StreamStates(AgentStates):  # type: ignore[misc]
    """A stream in place of the source: it takes what comes and keeps nothing of it."""

    def __init__(self, interpreter: Interpreter) -> None:
        self.interpreter = interpreter
        self.source_finished = False
        super().__init__()

    def reset(self) -> None:
        """Begin a new sentence."""
        super().reset()
        self.stream = self.interpreter.stream()
        self.resampler: Resampler | None = None
        self.words: list[str] = []

    def update_source(self, segment: Segment) -> None:
        """Translate one more segment, and all that is left with the last one."""
        is_new = segment.finished and not self.source_finished
        self.source_finished = segment.finished
        if not isinstance(segment, EmptySegment):
            self.tgt_lang = segment.tgt_lang
            content: Any = [segment.content]
            if isinstance(segment, SpeechSegment):
                content = self._resampled(segment)
            self.words += self.stream.push(content)
        if is_new:
            self.words += self.stream.finish()

    def _resampled(self, segment: SpeechSegment) -> Any:
        extractor = self.interpreter.extractor
        if self.resampler is None and extractor is not None:
            self.resampler = Resampler(segment.sample_rate, extractor.sampling_rate)
        assert self.resampler is not None  # A model of text refuses sound.
        return self.resampler.push(np.asarray(segment.content, np.float32), last=segment.finished)


class _Streaming:
    """What both agents do."""

    interpreter: Interpreter

    def __init__(self, args: Namespace) -> None:
        self.interpreter = load_trained(Path(args.run)).interpreter(
            args.policy, chunk_size=args.chunk_size, reset=args.reset, beam=args.beam
        )
        wants = "text" if self.interpreter.extractor is None else "speech"
        if wants != self.source_type:  # type: ignore[attr-defined]
            raise ConfigError(f"{args.run} translates {wants}; use the agent of that")
        super().__init__(args)  # type: ignore[call-arg]

    @staticmethod
    def add_args(parser: ArgumentParser) -> None:
        """The agent's own options."""
        parser.add_argument("--run", required=True, help="run folder of leap simul train")
        parser.add_argument("--policy", default="wait-3", help="wait-3, offline, align-2, ...")
        parser.add_argument("--chunk-size", type=int, help="source states read at once")
        parser.add_argument("--reset", type=int, help="begin anew after at most this many states")
        parser.add_argument("--beam", type=int, default=1, help="hypotheses at a sentence's end")

    def build_states(self) -> StreamStates:
        """The state of a new sentence."""
        return StreamStates(self.interpreter)

    def policy(self, states: StreamStates | None = None) -> Action:
        """Write all words that have come up, if there are any."""
        states = states or self.states  # type: ignore[attr-defined]
        assert states is not None
        words, states.words = states.words, []
        if not words and not states.source_finished:
            return ReadAction()
        return WriteAction(" ".join(words), finished=states.source_finished)


class TextAgent(_Streaming, TextToTextAgent):  # type: ignore[misc]
    """Translates text."""


class SpeechAgent(_Streaming, SpeechToTextAgent):  # type: ignore[misc]
    """Translates speech."""
