"""Attention as functions of tensors: no parameters, no config, no hidden state.

Tensors are `[batch, heads, tokens, width]`, as in `scaled_dot_product_attention`. A causal op takes
a state and returns the next one, and gives the same result whole, cut anywhere and continued,
packed, or padded. Which op suits which task: docs/guides/ops.md.
"""

from leap.ops.additive import FocusState, WindowState, additive_attention, additive_pool
from leap.ops.convolution import TapState, causal_convolution
from leap.ops.delta import DeltaState, causal_delta_attention
from leap.ops.linear import (
    LinearState,
    causal_linear_attention,
    causal_proportional_attention,
    causal_travelled_attention,
    linear_attention,
    two_way_linear_attention,
)
from leap.ops.softmax import SoftmaxState, causal_softmax_attention, softmax_attention
from leap.ops.staircase import staircase_linear_attention
from leap.ops.state import State, load_state, load_states, save_states

__all__ = [
    "DeltaState",
    "FocusState",
    "LinearState",
    "SoftmaxState",
    "State",
    "TapState",
    "WindowState",
    "additive_attention",
    "additive_pool",
    "causal_convolution",
    "causal_delta_attention",
    "causal_linear_attention",
    "causal_proportional_attention",
    "causal_softmax_attention",
    "causal_travelled_attention",
    "linear_attention",
    "load_state",
    "load_states",
    "save_states",
    "softmax_attention",
    "staircase_linear_attention",
    "two_way_linear_attention",
]
