"""`leap lm generate`: text on the screen as it is written.

Apart from `leap.cli.lm`, so that an exported model writes without what the commands beside it need.
"""

import sys

from leap.runtime.manifest import is_export
from leap.tasks.lm import writing
from leap.tasks.lm.writing import GenerateConfig


def generate(config: GenerateConfig) -> None:
    """Show the text as it is made, and at the end how fast that was."""
    if not is_export(config.run):
        from transformers.utils import logging

        logging.set_verbosity_error()  # As in `leap.cli.lm`.
    begun = False

    def show(piece: str) -> None:
        nonlocal begun
        print(piece if begun else config.prompt + piece, end="", flush=True)
        begun = True

    written = writing.generate(config, show)
    print()
    speed = written.tokens_per_second
    facts = [f"{len(written.tokens)} tokens"]
    if speed is not None:
        facts.append(f"{speed:.1f} per second")
    if written.state_bytes is not None:
        facts.append(f"state of {written.state_bytes:,} bytes")
    if config.state is not None:
        facts.append(f"kept in {config.state}")
    print(f"[{', '.join(facts)}]", file=sys.stderr)
