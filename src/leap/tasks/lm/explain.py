"""What a trained model attends to in a text, shown as a page, a picture and numbers."""

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from leap.errors import ConfigError
from leap.explain import Explanation
from leap.explain import explain as explain_tokens
from leap.explain.page import explanation_page, importance_picture
from leap.reports.files import write_report
from leap.runtime.text import check_prompt
from leap.tasks.lm.model import load_model
from leap.tasks.lm.tokenizer import TextTokenizer


@dataclass(frozen=True, kw_only=True)
class ExplainConfig:
    """Show what a model attends to in a text."""

    run: Path
    """Run folder of leap lm train, or a folder with a Hugging Face model."""
    prompt: str
    """The text to read."""
    token: int = -1
    """The token whose view is shown: 0 is the start of the text, -1 the last one, by whose view
    the model would go on."""
    output: Path = Path("runs/explain")
    """Folder for explain.html, explain.png and explain.json."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ConfigError("prompt is empty; give a text to explain")
        check_prompt(self.prompt)


@dataclass(frozen=True)
class ExplainedText:
    """A text in tokens, and what they attended to."""

    pieces: list[str]
    """The text of each token. The first is what a text begins after, the end of another."""
    found: Explanation


def explain(config: ExplainConfig) -> ExplainedText:
    """Read as the config says, and write the page, the picture and the numbers."""
    model, tokenizer = load_model(config.run)
    explained = explain_text(model, tokenizer, config.prompt)
    pieces, found = explained.pieces, explained.found
    importance = found.importance(config.token)[0]
    numbers = {
        "token": range(len(pieces))[config.token],
        "pieces": pieces,
        "through_layers": found.through_layers(config.token)[0].tolist(),
        "layers": [
            {"name": name, "heads": heads.tolist()}
            for name, heads in zip(found.names, importance, strict=True)
        ],
    }
    files = {
        "explain.html": explanation_page(pieces, found, config.token),
        "explain.png": importance_picture(pieces, found, config.token),
        "explain.json": numbers,
    }
    write_report(config.output, files)
    return explained


def explain_text(model: PreTrainedModel, tokenizer: TextTokenizer, text: str) -> ExplainedText:
    """What a model attends to in a text, read as `leap lm generate` reads a prompt."""
    ids = tokenizer.encode(text).long()
    spell = tokenizer.stream()
    pieces = [str(tokenizer.hugging_face.eos_token), *(spell(i) for i in ids.tolist())]
    read = ids.new_tensor([tokenizer.eos_id, *ids.tolist()]).unsqueeze(0)
    return ExplainedText(pieces, explain_tokens(model, read.to(model.device)))
