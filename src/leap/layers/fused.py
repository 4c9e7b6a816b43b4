"""Blocks as one call of the native library, for one more token of each row: decoding on a CPU.

A token is little work, and calling some twenty operations per layer for it is most of its time. So
where blocks are what `src/native/block.h` knows, and nobody looks at what goes on inside them, one
call passes the token through all of them. The numbers are those of the blocks themselves, and the
states are of the same kind: any token may go either way.

Weights are not copied. Which they are is noted once, and looked at again before each token: modules
that were exchanged, moved or hooked make a new description, or a reason not to take this way.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooked

from leap.layers.block import Block, FeedForward
from leap.layers.convolution import ConvolvedState, ShortConvolution
from leap.layers.dropout import Dropout
from leap.layers.equalise import Learned
from leap.layers.gate import ForgetGate
from leap.layers.leapformer import LeapformerAttention
from leap.layers.proportion import LearnedProportion
from leap.layers.travel import Steps
from leap.ops import backends
from leap.ops.convolution import TapState
from leap.ops.derivatives import followed
from leap.ops.linear import LinearState
from leap.ops.linear.gated import LOWEST
from leap.ops.native import block as native
from leap.ops.native import library
from leap.ops.native.causal import MAPS
from leap.ops.state import Recurrent

M = TypeVar("M", bound=nn.Module)
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
RECORDED = "tokens are recorded, to be taken back"
OTHER_STATE = "it goes on from what these layers have read"
IsIdle = Callable[[Callable[..., Any]], bool]
"""Whether a hook does nothing at the moment."""


def _never(hook: Callable[..., Any]) -> bool:
    """Every hook does something."""
    return False


class FusedBlocks:
    """Passes one token of each row through the blocks of a decoder, where the library can.

    Args:
        kind: class of the blocks.
        is_idle: whether a hook that it is given does nothing at the moment.
    """

    def __init__(self, kind: type[Block] = Block, is_idle: IsIdle = _never) -> None:
        self.kind, self.is_idle = kind, is_idle
        self._known: Description | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Addresses are of this model in this process: a copy finds its own.
        return FusedBlocks, (self.kind, self.is_idle)

    def refusal(
        self,
        layers: nn.ModuleList,
        x: Tensor,
        states: Sequence[Recurrent | None],
        key_mask: Tensor | None,
    ) -> str | None:
        """Why a token of each row goes the plain way, or None if it need not.

        Args:
            layers: an `nn.ModuleDict` for each block, which holds it as its `block`.
            x: tokens, `[b, t, d]`.
            states: what each has read.
            key_mask: true at real tokens.
        """
        name = backends.named()
        if name not in (None, "native"):
            return f"the backend {name} was named"
        if x.shape[1] != 1 or not x.shape[0]:
            return "it is for one token of each row"
        if key_mask is not None:
            return "it has no pads"
        if followed(x):
            return "it has no gradient, and a compiler or a mode of torch cannot look into it"
        if x.dtype != torch.float32 or x.device.type != "cpu":
            return "it is for float32 on the CPU"
        known = self._known
        if known is None or not known.holds(layers):
            known = self._known = Description(layers, self.kind)
        return known.reason or known.looked_at(self.is_idle) or known.misfit(states, x.shape[0])

    def step(self, x: Tensor, states: Sequence[Recurrent | None]) -> tuple[Tensor, list[Recurrent]]:
        """Tokens `[b, 1, d]` after all blocks and the states then, where nothing was refused."""
        known = self._known
        assert known is not None  # `refusal` saw to it.
        y, after = native.advance(known.blocks, x.squeeze(1), [_kept(state) for state in states])
        return y.unsqueeze(1), _states(states, after)


def _kept(state: Any) -> native.Kept:
    """The tensors of a state, as they lie in memory."""
    tokens = None
    if isinstance(state, ConvolvedState):
        tokens, state = state.taps.x.contiguous(), state.inner
    return native.Kept(
        state.kv.contiguous(),
        state.k.contiguous(),
        None if state.log_decay is None else state.log_decay.contiguous(),
        None if state.angle is None else state.angle.contiguous(),
        tokens,
    )


def _states(before: Sequence[Any], after: Sequence[native.Kept]) -> list[Recurrent]:
    """States of the same kinds with what is kept now, one token longer."""
    lengths = []
    for state in before:
        lengths.append(state.length)
        if isinstance(state, ConvolvedState):
            lengths += [state.taps.length, state.inner.length]
    longer = iter(torch.stack(lengths).add_(1).unbind())
    found: list[Recurrent] = []
    for state, kept in zip(before, after, strict=True):
        length = next(longer)
        if isinstance(state, ConvolvedState):
            assert kept.tokens is not None  # as `_kept` gave them
            taps = TapState(kept.tokens, length=next(longer))
            inner = LinearState(*kept[:4], length=next(longer))
            found.append(ConvolvedState(taps, inner, length=length))
        else:
            found.append(LinearState(*kept[:4], length=length))
    return found


def _is_double(x: Tensor | None, shape: tuple[int, ...] | None) -> bool:
    """Whether a tensor is of double precision and of this shape, or neither is there."""
    if x is None or shape is None:
        return x is None and shape is None
    return x.dtype == torch.float64 and x.shape == shape


class Expected(NamedTuple):
    """Shapes of what a block keeps of each row; None where it has no such thing."""

    kv: tuple[int, int, int]
    log_decay: tuple[int, int] | None
    angle: tuple[int, int] | None
    tokens: tuple[int, int] | None


def _expected(layer: LeapformerAttention) -> Expected:
    """What a layer keeps."""
    h, rank, clocks, tokens = layer.n_head, 1, None, None
    if layer.steps is not None:
        clocks = layer.steps.clocks or 0
        rank = 1 + 2 * clocks
    elif layer.q_proportion is not None:
        rank = 2
    if layer.convolution is not None:
        n_channel, taps = layer.convolution.weight.shape
        tokens = (taps - 1, n_channel)
    fades = layer.gate is not None or layer.fade is not None
    return Expected(
        kv=(h, rank * layer.head_width, layer.value_width),
        log_decay=(h, 1) if fades else None,
        angle=None if clocks is None else (h, clocks),
        tokens=tokens,
    )


class NotFused(Exception):
    """A block is not what the library knows; the message says why."""


class Description:
    """What the library is told of blocks, and all by which it could become untrue.

    Args:
        layers: an `nn.ModuleDict` for each block, which holds it as its `block`.
        kind: class of the blocks.
    """

    def __init__(self, layers: nn.ModuleList, kind: type[Block]) -> None:
        self.layers, self._n_layer = layers, len(layers)
        self.reason: str | None = library.missing()
        self._modules: list[tuple[dict[str, Any], str]] = []
        self._found_modules: list[nn.Module | None] = []
        self._parameters: list[tuple[dict[str, Any], str]] = []
        self._found_parameters: list[Tensor | None] = []
        self._addresses: list[int] = []
        self._hooks: list[dict[int, Any]] = []
        self._learned: list[Learned] = []
        self._dropouts: list[nn.Dropout] = []
        self._attentions: list[LeapformerAttention] = []
        self._expected: list[Expected] = []
        self._kept: list[Any] = []
        described = []
        try:
            for name in layers._modules if self.reason is None else ():
                holder = self._child(layers, name, nn.ModuleDict)
                described.append(self._block(self._child(holder, "block", kind)))
        except NotFused as error:
            self.reason = str(error)
        self.blocks = (library.Block * len(described))(*described)
        self._own = [vars(each) for each in self._found_modules if each is not None]
        self._present = [each for each in self._found_parameters if each is not None]
        self._addresses = [each.data_ptr() for each in self._present]

    def holds(self, layers: nn.ModuleList) -> bool:
        """Whether modules and weights are where they were."""
        return (
            layers is self.layers
            and len(layers) == self._n_layer
            and all(map(operator.is_, _read(self._modules), self._found_modules))
            and all(map(operator.is_, _read(self._parameters), self._found_parameters))
            and list(map(Tensor.data_ptr, self._present)) == self._addresses
        )

    def looked_at(self, is_idle: IsIdle) -> str | None:
        """What somebody does to modules that the library would pass over, or None."""
        hooks = (hook for each in self._hooks if each for hook in each.values())
        if hooked._has_any_global_hook() or not all(map(is_idle, hooks)):
            return "there are hooks on modules of the blocks"
        if any("forward" in each for each in self._own):
            return "the forward of a module was exchanged"
        if any(each._notes is not None or each._seen is not None for each in self._learned):
            return "somebody looks at what is read off tokens"
        if any(each._held is not None for each in self._learned):
            return "a learned part is held at its mean"
        if any(each.training and each.p for each in self._dropouts):
            return "in training it has no dropout; call model.eval()"
        if any(each.training and each.dropout for each in self._attentions):
            return "in training it has no dropout; call model.eval()"
        return None

    def misfit(self, states: Sequence[Recurrent | None], n_rows: int) -> str | None:
        """Why states are not to go on from, or None."""
        for expected, state in zip(self._expected, states, strict=True):
            inner: Any = state
            if expected.tokens is not None:
                if not isinstance(state, ConvolvedState):
                    return OTHER_STATE
                inner, tokens = state.inner, state.taps.x
                if state.taps.trail is not None:
                    return RECORDED
                if tokens.shape != (n_rows, *expected.tokens) or tokens.dtype != torch.float32:
                    return OTHER_STATE
            if not isinstance(inner, LinearState):
                return OTHER_STATE
            if inner.trail is not None:
                return RECORDED
            # Of other shapes and dtypes than these a layer makes none, but files may hold them.
            if not (
                _is_double(inner.kv, (n_rows, *expected.kv))
                and _is_double(inner.k, (n_rows, *expected.kv[:2]))
                and _is_double(
                    inner.log_decay, expected.log_decay and (n_rows, *expected.log_decay)
                )
                and _is_double(inner.angle, expected.angle and (n_rows, *expected.angle))
            ):
                return OTHER_STATE
        return None

    def _block(self, block: Block) -> library.Block:
        attention = self._child(block, "attention", LeapformerAttention)
        feed_forward = self._child(block, "feed_forward", FeedForward)
        self._dropouts.append(self._child(block, "dropout", Dropout))
        self._dropouts += [self._child(feed_forward, name, Dropout) for name in "24"]
        if self._child(feed_forward, "1", nn.GELU).approximate != "none":
            raise NotFused("it has no approximate GELU")
        return native.describe(
            attention_norm=self._norm(block, "attention_norm"),
            feed_forward_norm=self._norm(block, "feed_forward_norm"),
            up=self._linear(feed_forward, "0"),
            down=self._linear(feed_forward, "3"),
            **self._attention(attention),
        )

    def _attention(self, layer: LeapformerAttention) -> dict[str, Any]:
        feature = layer.feature.name
        if layer.form != "causal":
            raise NotFused(f"it is for form='causal', and not {layer.form!r}")
        if feature not in MAPS:
            raise NotFused(f"it has the feature maps {', '.join(MAPS)}, and not {feature}")
        if layer.rotary:
            raise NotFused("it has no rotary positions")
        if layer.proportion == "fixed":
            raise NotFused("it has no fixed proportions")
        self._attentions.append(layer)
        described: dict[str, Any] = {
            "width": layer.hidden_size,
            "heads": layer.n_head,
            "features": layer.head_width,
            "values": layer.value_width,
            "feature": feature,
            "eps": layer.eps,
            "normalise": layer.normalise,
            "query_divisor": layer.head_width**0.5 if layer.scale_query else 1.0,
            "places": layer.proportion,
            "from_features": layer.proportion_input == "features",
            **{name: self._linear(layer, f"{name}_proj") for name in "qkvo"},
        }
        if layer.output_gate is not None:
            described["output_gate"] = self._linear(layer, "output_gate")
        if layer.norm is not None:
            rms = self._child(layer, "norm", nn.RMSNorm)
            described["head_norm"] = native.norm(self._weight(rms, "weight"), None, layer.eps)
        described |= self._fading(layer) | self._places(layer)
        if layer.convolution is not None:
            convolution = self._child(layer, "convolution", ShortConvolution)
            weight = self._weight(convolution, "weight")
            described["taps"], described["convolution"] = weight.shape[1], weight.data_ptr()
        self._expected.append(_expected(layer))
        return described

    def _fading(self, layer: LeapformerAttention) -> dict[str, Any]:
        described: dict[str, Any] = {}
        if layer.gate is not None:
            gate = self._learned_part(layer, "gate", ForgetGate)
            if gate.of_channels:
                raise NotFused("it has gates per head, and not per feature")
            described["gate"] = self._net(gate)[0]
        if layer.fade is not None:
            rates = torch.tensor([max(rate, LOWEST) for rate in layer.fade], dtype=torch.double)
            self._kept.append(rates)
            described["rate"] = rates.data_ptr()
        return described

    def _places(self, layer: LeapformerAttention) -> dict[str, Any]:
        if layer.steps is not None:
            steps = self._learned_part(layer, "steps", Steps)
            assert steps.clocks is not None  # as of all steps in the causal form
            if steps.clocks > native.MOST_CLOCKS:
                raise NotFused(f"it has room for {native.MOST_CLOCKS} clocks of a head")
            frequency = self._weight(steps, "log_frequency").data_ptr()
            nets = [] if steps.net is None else self._net(steps)
            return {"steps": nets, "clocks": steps.clocks, "log_frequency": frequency}
        if layer.proportion != "learned":
            return {}
        described = {}
        for name in ("q", "k"):
            net = self._learned_part(layer, f"{name}_proportion", LearnedProportion)
            if net.per_head or net.bins is not None:
                raise NotFused("it has one net for all heads, without bins")
            described[f"{name}_place"] = self._net(net)
        return described

    def _learned_part(self, owner: nn.Module, name: str, kind: type[M]) -> M:
        part = self._child(owner, name, kind)
        assert isinstance(part, Learned)
        self._learned.append(part)
        return part

    def _net(self, owner: nn.Module) -> list[library.Linear]:
        """The one or two linear layers of a net."""
        net = self._child(owner, "net", nn.Sequential)
        if len(net) == 1:
            return [self._linear(net, "0")]
        self._child(net, "1", nn.ReLU)
        return [self._linear(net, "0"), self._linear(net, "2")]

    def _linear(self, owner: nn.Module, name: str) -> library.Linear:
        module = self._child(owner, name, nn.Linear)
        return native.linear(self._weight(module, "weight"), self._bias(module))

    def _norm(self, owner: nn.Module, name: str) -> library.Norm:
        module = self._child(owner, name, nn.LayerNorm)
        return native.norm(self._weight(module, "weight"), self._bias(module), module.eps)

    def _child(self, owner: nn.Module, name: str, kind: type[M]) -> M:
        """A module's part of this name, if calling it does what its class does."""
        found = owner._modules.get(name)
        self._modules.append((owner._modules, name))
        self._found_modules.append(found)
        if type(found) is not kind:
            raise NotFused(f"{name} of {type(owner).__name__} is not a plain {kind.__name__}")
        self._hooks += [getattr(found, each) for each in HOOKS]
        return found

    def _weight(self, owner: nn.Module, name: str) -> Tensor:
        found = self._parameter(owner, name)
        if found is None:
            raise NotFused(f"{type(owner).__name__} has no {name}")
        return found

    def _bias(self, owner: nn.Module) -> Tensor | None:
        return self._parameter(owner, "bias")

    def _parameter(self, owner: nn.Module, name: str) -> Tensor | None:
        found = owner._parameters.get(name)
        self._parameters.append((owner._parameters, name))
        self._found_parameters.append(found)
        if found is None:
            return None
        plain = type(found) in (Tensor, nn.Parameter) and found.is_contiguous()
        if not plain or found.dtype != torch.float32 or found.device.type != "cpu":
            raise NotFused("it takes weights in float32 on the CPU")
        return found


def _read(places: list[tuple[dict[str, Any], str]]) -> list[Any]:
    return [values.get(name) for values, name in places]
