"""What an attention may have besides its name, alike in every task: as flags, and in short forms.

A short form is a name with options after colons, as leapformer:travelled:gate:conv4.
"""

import re
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from leap.errors import ConfigError
from leap.layers.gate import Gate


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Settings of attentions that have them; each is the model's own unless given."""

    gate: Gate | None = None
    """Forget gate: per head, or in linear attentions per channel; not in LEAP. By default per head
    in language models of LeaPformer, unless proportion is given, else none."""
    convolution: int | None = None
    """Taps of a short convolution over the projections of causal attentions, usually 4; by
    default as for gate: 4 or none."""
    output_gate: bool | None = None
    """Multiply what leaves attentions by a learned gate of each channel; by default as for gate,
    and in gated-delta."""
    proportion: Literal["travelled", "learned"] | None = None
    """How LeaPformer knows where tokens stand: by steps that are added up, or read off each token
    as in the paper; by default language models travel and others read. Given, a model has no
    more than it is told."""
    clocks: int | None = None
    """Frequencies of each head by which travelled places are compared; 1 by default."""
    constant_steps: bool | None = None
    """Let every token step as far as any other, so that of travelled places only clocks learn; by
    default steps are learned."""
    proportion_hidden: int | None = None
    """Hidden units of the nets that learn proportions, by default 16, or steps, by default none."""
    proportion_per_head: bool | None = None
    """Whether each head has a proportion or step of its own; by default only a step."""
    places: Literal["undivided", "divided"] | None = None
    """Of encoders that travel: places as they are, as by default, or divided by the last one."""

    def given(self) -> dict[str, Any]:
        """Those that were given, as fields of a model's config."""
        names = [f.name for f in fields(AttentionOptions)]
        return {name: value for name in names if (value := asdict(self)[name]) is not None}


OPTIONS: dict[str, dict[str, Any]] = {
    "gate": {"gate": "head"},
    "gate-channel": {"gate": "channel"},
    "output-gate": {"output_gate": True},
    "paper": {"proportion": "learned"},
    "travelled": {"proportion": "travelled"},
    "constant": {"proportion": "travelled", "constant_steps": True},
    "divided": {"proportion": "travelled", "places": "divided"},
    "shared": {"proportion_per_head": False},
    "own": {"proportion_per_head": True},
}
"""Options of short forms, by what they set."""
NUMBERED = {"conv": "convolution", "clocks": "clocks", "hidden": "proportion_hidden"}
"""Those with a number behind them, as conv4."""


def parse_option(text: str) -> dict[str, Any] | None:
    """What an option of a short form sets; None if it is not one of these."""
    if text in OPTIONS:
        return OPTIONS[text]
    match = re.fullmatch(r"([a-z]+)(\d+)", text)
    if match is None or match[1] not in NUMBERED:
        return None
    return {NUMBERED[match[1]]: int(match[2])}


def parse_short_form(text: str) -> tuple[str, dict[str, Any]]:
    """The name of an attention, and what its options set."""
    name, *options = text.split(":")
    settings: dict[str, Any] = {}
    for option in options:
        found = parse_option(option)
        if found is None:
            known = ", ".join([*OPTIONS, *(f"{name}4" for name in NUMBERED)])
            raise ConfigError(f"option {option!r} in {text!r} is not known; there are {known}")
        settings |= found
    return name, settings
