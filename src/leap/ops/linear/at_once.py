"""Causal linear attention of a few tokens at once, without a loop over them: for graphs.

    a_ij = (fq_i . fk_j) exp(c_i - c_j)                    j <= i, of these tokens
    o_i  = (sum_j a_ij v_j + exp(c_i) fq_i kv) / max(sum_j a_ij + exp(c_i) fq_i . k_sum, eps)

c_i adds up the logs of the gates, one per head or one per feature. A graph that is written to a
file has to serve any number of tokens, and knows no loop whose length depends on it. It costs
O(t^2), so long texts are given some tokens at a time. All of it is in the precision of the state,
in which no product of three numbers overflows.

Axes: b batch, h heads, t tokens, f features, e values.
"""

from dataclasses import replace

import torch
from torch import Tensor

from leap.ops.linear.call import Call, all_gates, real_tokens
from leap.ops.linear.parts import normalised, wide_keys, wide_queries
from leap.ops.linear.square import left_between
from leap.ops.linear.state import LinearState


def attend(call: Call) -> tuple[Tensor, LinearState]:
    """Attended values `[b, h, t, e]`, and the state after."""
    tokens, before, log_gate = real_tokens(call), call.before, all_gates(call)
    kv, k_sum, log_decay = before.kv, before.k, before.log_decay
    q, k, v = (x.to(kv.dtype) for x in (wide_queries(tokens), wide_keys(tokens), tokens.v))
    n = q.shape[2]
    if log_gate is None:
        scores, since, kept = q @ k.mT, q, k
    else:
        decay = log_gate.to(kv.dtype).cumsum(2)
        end = decay[:, :, -1]
        left = left_between(decay.mT)  # `[b, h, 1 or f, t, t]`
        if log_gate.shape[-1] == 1:
            scores = (q @ k.mT) * left.squeeze(2)
        else:
            pairs = q.mT.unsqueeze(-1) * k.mT.unsqueeze(-2)
            scores = (pairs * left).sum(2)
        since, kept = q * decay.exp(), k * (end.unsqueeze(2) - decay).exp()
        kv, k_sum = kv * end.exp().unsqueeze(-1), k_sum * end.exp()
        assert log_decay is not None  # whoever has gates saw to it
        log_decay = log_decay + end
    order = torch.arange(n, device=q.device)
    scores = scores.masked_fill(order > order.unsqueeze(1), 0)
    num = scores @ v + since @ before.kv
    o = num
    if call.normalise:
        den = scores.sum(-1, keepdim=True) + since @ before.k.unsqueeze(-1)
        o = normalised(num, den, call.eps)
    after = replace(
        before,
        kv=kv + kept.mT @ v,
        k=k_sum + kept.sum(2),
        log_decay=log_decay,
        length=before.length + call.n_real,
        trail=None,
    )
    return o.to(tokens.v.dtype), after
