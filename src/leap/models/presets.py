"""Models by name, from one for tests to the size of GPT-2 medium."""

from typing import Any

from leap.errors import ConfigError
from leap.models.config import LeapConfig, LeapformerConfig

WIKITEXT_103 = {
    # The decoder of Baevski and Auli on WikiText-103, with LeaPformer's attention, as the paper has
    # it, where other presets have what learned best.
    "vocab_size": 267_744,
    "hidden_size": 1024,
    "n_head": 8,
    "n_positions": 512,
    "position_embedding": "sinusoidal",
    "proportion": "learned",
    "proportion_step_down": 4,
    "adaptive_cutoffs": [20_000, 60_000],
    "hidden_dropout_prob": 0.3,
}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"vocab_size": 256, "hidden_size": 32, "n_layer": 2, "n_head": 2, "n_positions": 128},
    "small": {"hidden_size": 128, "n_layer": 6, "n_head": 4, "n_positions": 2048},
    "140m": WIKITEXT_103 | {"n_layer": 8},
    "247m": WIKITEXT_103 | {"n_layer": 16},
    "350m": {
        "vocab_size": 50_257,
        "hidden_size": 1024,
        "intermediate_size": 3584,  # Less than 4 hidden_size, to make room for output gates.
        "n_layer": 24,
        "n_head": 16,
        "n_positions": 2048,
    },
}
"""`tiny` for tests, `small` of LEAP's experiments, `140m` and `247m` of the LeaPformer paper's."""


def preset(name: str, **changes: Any) -> LeapformerConfig:
    """The config called `name`, with changes; a LeapConfig if `attention` is changed to "leap".

    Where the vocabulary is changed, adaptive cutoffs beyond its end are left out.
    """
    if name not in PRESETS:
        raise ConfigError(f"no preset is called {name!r}; there are {', '.join(PRESETS)}")
    base = PRESETS[name]
    if "adaptive_cutoffs" in base and "vocab_size" in changes:
        cutoffs = [cut for cut in base["adaptive_cutoffs"] if cut < changes["vocab_size"]]
        base = base | {"adaptive_cutoffs": cutoffs or None}
    kind = LeapConfig if changes.get("attention") == "leap" else LeapformerConfig
    return kind(**base | changes)
