"""Attention as torch modules: parameters around the functions of `leap.ops`.

Every layer is called in one way, `layer(x, state=None) -> (y, state)`, see `leap.layers.attention`.
"""

from leap.layers.additive import FORMULATIONS, FastformerState, Focus, LeapAttention
from leap.layers.attention import Attention
from leap.layers.block import Block, FeedForward
from leap.layers.convolution import ConvolvedState, ShortConvolution
from leap.layers.delta import DecayGate, GatedDeltaAttention
from leap.layers.dropout import Dropout
from leap.layers.efficient.fastformer import FastformerAttention
from leap.layers.gate import ForgetGate
from leap.layers.leapformer import LeapformerAttention
from leap.layers.proportion import FixedProportion, LearnedProportion
from leap.layers.softmax import SoftmaxAttention

__all__ = [
    "FORMULATIONS",
    "Attention",
    "Block",
    "ConvolvedState",
    "DecayGate",
    "Dropout",
    "FastformerAttention",
    "FastformerState",
    "FeedForward",
    "FixedProportion",
    "Focus",
    "ForgetGate",
    "GatedDeltaAttention",
    "LeapAttention",
    "LeapformerAttention",
    "LearnedProportion",
    "ShortConvolution",
    "SoftmaxAttention",
]
