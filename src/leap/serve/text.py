"""Text of one reply as its tokens come, up to a stop string."""

from collections.abc import Sequence

from leap.serve.protocol import Spell


class Text:
    """What a reply says so far.

    Args:
        spell: gives the text that each token completes.
        stops: strings before which the reply ends.
    """

    def __init__(self, spell: Spell, stops: Sequence[str] = ()) -> None:
        self.spell = spell
        self.stops = stops
        self.held = ""
        """The end of the text, as far as it may be the beginning of a stop string."""
        self.n_characters = 0
        """Of the whole text, what is held included."""

    def push(self, token: int) -> tuple[str, str, bool]:
        """What the token spells, the text that is certain now, and whether a stop string came."""
        piece = self.spell(token)
        self.n_characters += len(piece)
        text = self.held + piece
        found = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            self.held = ""
            return piece, text[: min(found)], True
        n_held = max((_overlap(text, stop) for stop in self.stops), default=0)
        self.held = text[len(text) - n_held :]
        return piece, text[: len(text) - n_held], False

    def finish(self) -> str:
        """What was held back, as no stop string can come any more."""
        held, self.held = self.held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of a text a stop string begins with."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )
