"""The efficient attentions of the Long Range Arena comparison: encoders' layers, one per file.

They see whole sequences, and are called like all layers: `y, _ = layer(x, key_mask=mask)`.
A new one is a file here, and an entry in `EFFICIENT`.
"""

from leap.layers.attention import Attention
from leap.layers.efficient.bigbird import BigBirdAttention
from leap.layers.efficient.fastformer import FastformerAttention
from leap.layers.efficient.informer import InformerAttention
from leap.layers.efficient.joint_sinh import JointSinhAttention
from leap.layers.efficient.kernelized import KernelizedAttention
from leap.layers.efficient.linformer import LinformerAttention
from leap.layers.efficient.nystromformer import NystromformerAttention
from leap.layers.efficient.performer import PerformerAttention
from leap.layers.efficient.reformer import ReformerAttention
from leap.layers.efficient.s4d import S4DAttention
from leap.layers.efficient.skyformer import SkyformerAttention
from leap.layers.efficient.whole import WholeSequenceAttention

EFFICIENT: dict[str, type[Attention]] = {
    "bigbird": BigBirdAttention,
    "fastformer": FastformerAttention,
    "informer": InformerAttention,
    "joint-sinh": JointSinhAttention,
    "kernelized": KernelizedAttention,
    "linformer": LinformerAttention,
    "nystromformer": NystromformerAttention,
    "performer": PerformerAttention,
    "reformer": ReformerAttention,
    "s4d": S4DAttention,
    "skyformer": SkyformerAttention,
}
"""Layers by name, all called as `(hidden_size, n_head, *, bias, dropout, and its own options)`.

`linformer` needs `length`, the longest sequence (see `WholeSequenceAttention.needs_length`)."""

__all__ = [
    "EFFICIENT",
    "BigBirdAttention",
    "FastformerAttention",
    "InformerAttention",
    "JointSinhAttention",
    "KernelizedAttention",
    "LinformerAttention",
    "NystromformerAttention",
    "PerformerAttention",
    "ReformerAttention",
    "S4DAttention",
    "SkyformerAttention",
    "WholeSequenceAttention",
]
