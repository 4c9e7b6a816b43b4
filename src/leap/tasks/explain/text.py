"""What the prediction of a trained model rests on, in one text."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tyro.conf import Positional

from leap.errors import ConfigError, FileError, refuse_given
from leap.explain import Explanation, Trace, explain, trace
from leap.explain.importance import DEFAULT, METHODS, importance, log_probabilities
from leap.explain.page import Struck, explanation_page
from leap.layers import Attention
from leap.reports.files import write_report
from leap.runtime.text import check_prompt
from leap.tasks.explain.runs import Run, open_run


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Show which tokens of a text carry a prediction, and what striking them out does."""

    text: Positional[str]
    """The text to read."""
    run: Path
    """Run folder of a language model or of a classifier of texts, or a folder with a Hugging Face
    model."""
    token: int = -1
    """Of a language model, the token after which to predict: 0 is the start of the text, -1 its
    end. After others than the last, the token that does come is explained."""
    method: str = DEFAULT
    """How importance is found: see leap explain faithfulness, which compares the methods."""
    strike: int = 8
    """How many of the most important tokens to strike out, one at a time."""
    html: Path | None = None
    """Page to write, a file that needs nothing else; by default none."""
    json: Path | None = None
    """File to write the numbers to; by default they are only shown."""

    def __post_init__(self) -> None:
        if not self.text:
            raise ConfigError("text is empty; give a text to explain")
        check_prompt(self.text)
        for name in ("html", "json"):
            path = getattr(self, name)
            if path is not None and path.is_dir():
                raise ConfigError(f"{name}={path} is a folder; give a file to write")
        if self.strike < 0:
            raise ConfigError(f"strike={self.strike} must be 0 or more")
        if self.method not in METHODS:
            raise ConfigError(
                f"method={self.method!r} is not known; there are {', '.join(METHODS)}"
            )


@dataclass(frozen=True)
class ExplainedPrediction:
    """A text in tokens, and what a prediction rests on."""

    pieces: list[str]
    target: str
    """What is predicted: a token, or a class."""
    probability: float
    likeliest: list[tuple[str, float]]
    """What else could be, the likeliest first."""
    importance: list[float]
    struck: list[Struck]
    found: Explanation | Trace
    at: int | None
    left_out: int = 0
    """Tokens at the end of the text that the model does not read."""


def explain_text(config: TextConfig) -> ExplainedPrediction:
    """Explain as the config says, and write what it asks for."""
    run = open_run(config.run)
    if run.kind == "translation":
        raise FileError(
            f"{config.run} translates; leap explain proportions shows its cross-attention"
        )
    if run.kind != "lm":
        refuse_given(config, ("token",), f"of language models, and {config.run} classifies")
    explained = explain_prediction(run, config.text, config.token, config.method, config.strike)
    for path, content in ((config.html, page), (config.json, numbers)):
        if path is not None:
            write_report(path.parent, {path.name: content(explained)})
    return explained


@torch.no_grad()
def explain_prediction(
    run: Run, text: str, token: int = -1, method: str = DEFAULT, strike: int = 8
) -> ExplainedPrediction:
    """What a run's model predicts for a text, and what that rests on."""
    ids, target = _read(run, text, token)
    chances = log_probabilities(run.model, input_ids=ids)[0].exp()
    target = int(chances.argmax()) if target is None else target
    found = importance(run.model, ids, target, method).tolist()
    n = len(found) - (run.kind == "lm")
    heaviest = sorted(range(n), key=lambda i: -abs(found[i]))[:strike]
    before = float(chances[target])
    after = _without(run, ids, target, heaviest)
    ours = any(isinstance(module, Attention) for module in run.model.modules())
    best = chances.topk(min(5, len(chances)))
    return ExplainedPrediction(
        pieces=run.spell(ids),
        target=run.spell_one(target),
        probability=before,
        likeliest=[
            (run.spell_one(i), p)
            for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ],
        importance=found,
        struck=[Struck(i, found[i], before, p) for i, p in zip(heaviest, after, strict=True)],
        found=(trace if ours else explain)(run.model, ids),
        at=-1 if run.kind == "lm" else None,
        left_out=run.left_out(text),
    )


def _read(run: Run, text: str, token: int) -> tuple[Tensor, int | None]:
    """The text up to the token that predicts, and what comes after it, if that is known."""
    ids = run.encode(text)
    n = ids.shape[1]
    if run.kind != "lm" or token in (-1, n - 1):
        return ids, None
    if not -n <= token < n:
        raise ConfigError(f"token={token} is not among the {n} of this text; give {-n} to {n - 1}")
    at = range(n)[token]
    return ids[:, : at + 1], int(ids[0, at + 1])


def _without(run: Run, ids: Tensor, target: int, tokens: list[int]) -> list[float]:
    """The probability of the target without each of some tokens."""
    if not tokens:
        return []
    masks = ids.new_ones(len(tokens), ids.shape[1])
    masks[range(len(tokens)), tokens] = 0
    given: dict[str, Any] = {"input_ids": ids.expand(len(tokens), -1), "attention_mask": masks}
    return log_probabilities(run.model, **given)[:, target].exp().tolist()


def page(explained: ExplainedPrediction) -> str:
    """The page."""
    title = f"Why {explained.target!r} ({explained.probability:.1%})?"
    if explained.left_out:
        title += f" (the last {explained.left_out} tokens of the text were not read)"
    return explanation_page(
        explained.pieces,
        explained.found,
        explained.at,
        title=title,
        importance=explained.importance,
        struck=explained.struck,
    )


def numbers(explained: ExplainedPrediction) -> dict[str, Any]:
    """All that is shown, for JSON."""
    found = explained.found
    weights = found.importance(explained.at)[0]
    return {
        "pieces": explained.pieces,
        "target": explained.target,
        "probability": explained.probability,
        "likeliest": explained.likeliest,
        "importance": explained.importance,
        "left_out": explained.left_out,
        "struck": [asdict(each) for each in explained.struck],
        "through_layers": found.through_layers(explained.at)[0].tolist(),
        "layers": [
            {"name": name, "heads": heads.tolist()}
            for name, heads in zip(found.names, weights, strict=True)
        ],
    }
