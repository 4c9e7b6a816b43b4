"""What a trained language model attends to in a text."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from leap.explain import Explanation
from leap.explain import explain as explain_tokens
from leap.tasks.lm.tokenizer import TextTokenizer


@dataclass(frozen=True)
class ExplainedText:
    """A text in tokens, and what they attended to."""

    pieces: list[str]
    """The text of each token. The first is what a text begins after, the end of another."""
    found: Explanation


def explain_text(model: PreTrainedModel, tokenizer: TextTokenizer, text: str) -> ExplainedText:
    """What a model attends to in a text, read as `leap lm generate` reads a prompt."""
    ids = tokenizer.encode(text).long()
    spell = tokenizer.stream()
    pieces = [str(tokenizer.hugging_face.eos_token), *(spell(i) for i in ids.tolist())]
    read = ids.new_tensor([tokenizer.eos_id, *ids.tolist()]).unsqueeze(0)
    return ExplainedText(pieces, explain_tokens(model, read.to(model.device)))
