"""The one list of attentions: those a model's config can name, and what is measured of each.

Adding one is an entry in `ATTENTIONS`, and for an encoder's a file in `leap.layers.efficient` with
an entry there. What a mechanism has of its own, beyond the fields of the config, it takes from
`config.attention_options[name]`, as keyword arguments of its layer.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from leap.errors import ConfigError
from leap.layers import (
    Attention,
    GatedDeltaAttention,
    LeapAttention,
    LeapformerAttention,
    SoftmaxAttention,
)
from leap.layers.attention import Form
from leap.layers.definitions import COSFORMER, LEAP, LEAPFORMER, LINEAR, SOFTMAX, Definition
from leap.layers.efficient import EFFICIENT

if TYPE_CHECKING:
    from leap.models.config import LeapformerConfig

ALL_FORMS: tuple[Form, ...] = get_args(Form)
ENCODER: tuple[Form, ...] = ("bidirectional",)
GATES = ("gate", "convolution", "output_gate")
OF_TRAVEL = ("clocks", "constant_steps", "places")
OF_PROPORTIONS = ("proportion", "proportion_hidden", "proportion_per_head", *OF_TRAVEL)


@dataclass(frozen=True)
class Mechanism:
    """One kind of attention that a model's config can name."""

    build: Callable[..., Attention]
    """Makes the attention, of a config, a layer's number, a form, and the mechanism's options."""
    forms: tuple[Form, ...] = ALL_FORMS
    """What it can be used as."""
    rotary: bool = True
    """Whether it matches queries with keys, which positions can turn."""
    alibi: bool = True
    """Whether it can fade with distance at a fixed rate."""
    layer_type: str = "linear_attention"
    """What Hugging Face calls a layer of this kind."""
    options: tuple[str, ...] = GATES
    """Which of the settings that not all attentions have it reads."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Of the others, those that it has in any case; what is named in neither place it lacks."""
    definitions: tuple[Definition, ...] = ()
    """What it computes between its projections, for those that are measured by themselves."""


def build_attention(config: "LeapformerConfig", layer: int, form: Form) -> Attention:
    """The attention of one layer, for reading text as `form` says."""
    name = config.attentions[layer]
    mechanism = ATTENTIONS[name]
    if form not in mechanism.forms:
        raise ConfigError(
            f"attention={name!r} cannot be used as {form} attention; "
            f"those that can are {', '.join(usable_as(form))}"
        )
    options = config.attention_options.get(name, {})
    try:
        return mechanism.build(config, layer, form, **options)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error) or not options:
            raise
        raise ConfigError(f"attention_options[{name!r}]={options}: {error}") from error


def _leapformer(
    config: "LeapformerConfig", _layer: int, form: Form, **options: Any
) -> LeapformerAttention:
    given: dict[str, Any] = {
        "feature": config.feature,
        "proportion": config.proportion,
        "proportion_hidden": config.proportion_hidden,
        "proportion_step_down": config.proportion_step_down,
        "proportion_per_head": config.proportion_per_head,
        "proportion_bins": config.proportion_bins,
        "constant_steps": config.constant_steps,
        "clocks": config.clocks,
        "places": config.places,
        **_positions(config),
        "normaliser": config.normaliser,
        "gate": config.gate,
        "convolution": config.convolution,
        "output_gate": config.output_gate,
        "eps": config.attention_eps,
        **_common(config),
    }
    given |= options
    if form != "bidirectional" or given["proportion"] != "travelled":
        given["places"] = "undivided"  # Only there is the last place known.
    return LeapformerAttention(config.hidden_size, config.n_head, form=form, **given)


def _cosformer(
    config: "LeapformerConfig", layer: int, form: Form, **options: Any
) -> LeapformerAttention:
    # An encoder has the whole text before it, and so the true length of each.
    length = None if form == "bidirectional" else config.n_positions
    given: dict[str, Any] = {"proportion": "fixed", "length": length}
    return _leapformer(config, layer, form, **given | options)


def _linear(**fixed: Any) -> Callable[..., Attention]:
    """Linear attention with some of its settings fixed."""

    def build(
        config: "LeapformerConfig", layer: int, form: Form, **options: Any
    ) -> LeapformerAttention:
        return _leapformer(config, layer, form, **{"proportion": "none"} | fixed | options)

    return build


def _leap(config: "LeapformerConfig", layer: int, form: Form, **options: Any) -> LeapAttention:
    given: dict[str, Any] = {
        "form": form,
        "window": config.windows[layer],
        "alibi": config.position_embedding == "alibi",
        "formulation": config.formulation,
        "rescale": config.rescale,
        "convolution": config.convolution,
        **_common(config),
    }
    return LeapAttention(config.hidden_size, config.n_head, **given | options)


def _gated_delta(
    config: "LeapformerConfig", _layer: int, _form: Form, **options: Any
) -> GatedDeltaAttention:
    given: dict[str, Any] = {"convolution": config.convolution, **_common(config)}
    return GatedDeltaAttention(config.hidden_size, config.n_head, **given | options)


def _softmax(
    config: "LeapformerConfig", _layer: int, form: Form, **options: Any
) -> SoftmaxAttention:
    given: dict[str, Any] = {
        **_positions(config),
        "gate": config.gate,
        "convolution": config.convolution,
        "output_gate": config.output_gate,
        **_common(config),
    }
    return SoftmaxAttention(config.hidden_size, config.n_head, form=form, **given | options)


def _encoder(kind: Callable[..., Attention]) -> Mechanism:
    """A mechanism that sees whole texts only, and has nothing of the config but its sizes."""

    def build(config: "LeapformerConfig", _layer: int, _form: Form, **options: Any) -> Attention:
        given = _common(config)
        if getattr(kind, "needs_length", False):
            given["length"] = config.n_positions + (config.pooling == "cls")
        return kind(config.hidden_size, config.n_head, **given | options)

    return Mechanism(build, forms=ENCODER, rotary=False, options=())


def _positions(config: "LeapformerConfig") -> dict[str, Any]:
    """How an attention that matches queries with keys is told where tokens stand."""
    given = config.position_embedding
    selective = given == "selective"
    return {"rotary": "selective" if selective else given == "rotary", "alibi": given == "alibi"}


def _common(config: "LeapformerConfig") -> dict[str, Any]:
    return {"bias": config.attention_bias, "dropout": config.attention_dropout}


ATTENTIONS: dict[str, Mechanism] = {
    "leapformer": Mechanism(_leapformer, options=(*GATES, *OF_PROPORTIONS), definitions=LEAPFORMER),
    "cosformer": Mechanism(_cosformer, definitions=COSFORMER),
    "linear": Mechanism(_linear(), definitions=LINEAR),
    "elu-linear": Mechanism(_linear(feature="elu_plus_one")),
    "square": Mechanism(_linear(feature="square")),
    "cubic": Mechanism(_linear(feature="cubic")),
    "exp": Mechanism(_linear(feature="exp")),
    "sinh": Mechanism(_linear(feature="sinh")),
    "neg-sinh": Mechanism(_linear(feature="neg_sinh")),
    # As in RoFormer, equation 19; LeaPformer's authors turn half of a head, and scale queries down.
    "rope-linear": Mechanism(_linear(feature="elu_plus_one", rotary=True)),
    "leap": Mechanism(
        _leap,
        forms=("causal", "bidirectional"),
        rotary=False,
        options=("convolution",),
        definitions=LEAP,
    ),
    "gated-delta": Mechanism(
        _gated_delta,
        forms=("causal",),
        rotary=False,
        alibi=False,  # It learns how fast to forget.
        options=("convolution",),
        fixed={"output_gate": True},
    ),
    **{name: _encoder(kind) for name, kind in EFFICIENT.items()},
    "softmax": Mechanism(_softmax, layer_type="full_attention", definitions=SOFTMAX),
}
"""Every mechanism by its name in `LeapformerConfig.attention`."""


def check_options(
    given: Mapping[str, Any], attentions: Collection[str], proportion: str | None, *, divides: bool
) -> None:
    """Refuse settings that none of a model's attentions would read.

    Args:
        given: what was asked for, by the config's names.
        attentions: names of those that the model has.
        proportion: how its LeaPformer layers know where tokens stand.
        divides: whether one of them sees whole texts, of which the last place is known.
    """
    names = ",".join(dict.fromkeys(attentions))
    for name, value in given.items():
        kinds = [ATTENTIONS[each] for each in attentions]
        if not any(name in kind.options or kind.fixed.get(name, False) == value for kind in kinds):
            raise ConfigError(f"{name}={value} is nothing that attention={names} has; leave it out")
        if name in OF_TRAVEL and value and proportion != "travelled":
            raise ConfigError(
                f"{name}={value} is of travelled places, and proportion={proportion}; leave one of "
                "them out"
            )
        if name == "places" and value == "divided" and not divides:
            raise ConfigError(
                f"{name}={value} needs the last place of a text, which decoders do not know; "
                "leave it out"
            )


def usable_as(form: Form) -> list[str]:
    """Names of the mechanisms that can be used so."""
    return [name for name, mechanism in ATTENTIONS.items() if form in mechanism.forms]
