"""`leap explain`: what predictions rest on, where tokens stand, and whether that is so."""

from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text
from transformers.utils import logging

from leap.cli.progress import progress_shown
from leap.cli.table import show_table, show_written
from leap.explain.faithfulness import report_table
from leap.explain.page import depths, shown, tint
from leap.reports.table import Table
from leap.tasks.explain import faithfulness as measuring
from leap.tasks.explain import proportions as placing
from leap.tasks.explain import text as explaining
from leap.tasks.explain.faithfulness import FaithfulnessConfig
from leap.tasks.explain.proportions import ProportionsConfig
from leap.tasks.explain.text import TextConfig

# What goes wrong comes as a LeapError; the library's hints are for those who program with it.
logging.set_verbosity_error()


def text(config: TextConfig) -> None:
    """Print the text shaded by importance, and what striking tokens out does."""
    explained = explaining.explain_text(config)
    console = Console(highlight=False)
    others = ", ".join(f"{name!r} {p:.1%}" for name, p in explained.likeliest)
    print(f"predicted: {explained.target!r} {explained.probability:.1%}  (likeliest: {others})")
    if explained.left_out:
        print(f"the last {explained.left_out} tokens were left out: it reads no more than these")
    print(f"importance by {config.method}:")
    if console.is_terminal:
        console.print(_tinted(explained.pieces, explained.importance))
    rows = [
        [
            repr(explained.pieces[each.token]),
            str(each.token),
            f"{each.importance:+.3f}",
            f"{each.before:.3f} -> {each.after:.3f}",
        ]
        for each in explained.struck
    ]
    show_table(Table("", ("token", "place", "importance", "probability without it"), rows))
    for path in (config.html, config.json):
        if path is not None:
            print(f"wrote {path}")


def proportions(config: ProportionsConfig) -> None:
    """Print a row per layer, and say where the picture is."""
    show_table(placing.table(placing.proportions(config)))
    names = ("proportions.png", "proportions.csv", "results.md", "results.json")
    show_written(config.output, names)


def faithfulness(config: FaithfulnessConfig) -> None:
    """Measure, print the table, and say where the curves are."""
    with progress_shown() as progress:
        found = measuring.faithfulness(config, progress)
    show_table(report_table(found, f"{found.n_texts} texts, falls of the log-probability in nats"))
    print(f"largest gap: {found.best()}")
    show_written(config.output, ("results.md", "results.csv", "results.json", "curves.png"))


def _tinted(pieces: list[str], weights: list[float]) -> Text:
    """Black on white, whatever the terminal's colours, and the darker the more a piece weighs."""
    text = Text()
    for piece, weight, depth in zip(pieces, weights, depths(weights), strict=True):
        channels = (255 - abs(depth) * (255 - channel) for channel in tint(weight))
        text.append(shown(piece), Style(color="black", bgcolor=Color.from_rgb(*channels)))
    return text
