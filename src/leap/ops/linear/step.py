"""Linear attention of one more token: decoding, where the fewest calls are the fastest.

    kv = g kv + fk v^T        k_sum = g k_sum + fk        o = fq kv / max(fq . k_sum, eps)

Axes: b batch, h heads, f features, e values.
"""

from dataclasses import replace

import torch
from torch import Tensor

from leap.ops.features import widen
from leap.ops.linear.call import Call, real_tokens
from leap.ops.linear.parts import precision
from leap.ops.linear.state import LinearState


def attend(call: Call) -> tuple[Tensor, LinearState]:
    """Attended values `[b, h, 1, e]`, and the state after."""
    tokens, before, log_gate = real_tokens(call), call.before, None
    if call.log_gate is not None:
        log_gate = call.log_gate.squeeze(2)
    elif call.rate is not None:
        log_gate = tokens.k.new_tensor(call.rate, dtype=precision(tokens)).view(1, -1, 1)
    total = precision(tokens)
    q, k, v = tokens.q.to(total), tokens.k.to(total), tokens.v.to(total)
    if tokens.x is not None and tokens.y is not None:
        q, k = widen(torch.stack([q, k]), torch.stack([tokens.x, tokens.y]).to(total))
    kv, k_sum, log_decay = before.kv, before.k, before.log_decay
    if log_gate is not None and log_decay is not None:
        kept = log_gate.exp()
        kv, k_sum, log_decay = kv * kept.unsqueeze(-1), k_sum * kept, log_decay + log_gate
    after = replace(
        before,
        kv=torch.addcmul(kv, k.mT, v),
        k=k_sum + k.squeeze(2),
        log_decay=log_decay,
        length=before.length + call.n_real,
        trail=None,
    )
    return after.attend(q, normalise=call.normalise, eps=call.eps).to(tokens.v.dtype), after
