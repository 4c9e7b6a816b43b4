"""Many roll-outs from one saved state, as reinforcement learning needs them.

A model reads a long prefix once. What it keeps of it is a small file, which is loaded, forked as
often as wanted, and continued by chance. Nothing is trained here: without --run the model is fresh,
and what it writes is noise, at the cost of any other model of its size.

    python examples/rollouts.py
    python examples/rollouts.py --run runs/lm --temperature 0.8
"""

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor
from transformers import set_seed

from leap import LeapConfig, LeapForCausalLM
from leap.models import LeapformerForCausalLM, StateCache
from leap.tasks.lm.model import load_model
from leap.tasks.lm.tokenizer import TextTokenizer, byte_tokenizer


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Write many continuations of one text, which is read once."""

    run: Path | None = None
    """Run folder of leap lm train; by default a fresh model, for the cost alone."""
    prefix: int = 2048
    """Tokens of the text."""
    rollouts: int = 64
    """Continuations."""
    tokens: int = 32
    """Tokens in each."""
    temperature: float = 1.0
    """How bold to choose."""


def main(settings: Settings) -> list[str]:
    """Read, save, load, fork and sample; print what that took, and return the continuations."""
    model, tokenizer = make_model(settings.run)
    text = Path(argparse.__file__).read_text(encoding="utf-8")  # Some text that every machine has.
    prefix = tokenizer.encode(text)[: settings.prefix].long().unsqueeze(0)
    n = settings.rollouts

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        start = time.perf_counter()
        model.save_state(path, read(model, prefix[:, :-1]))
        once = time.perf_counter() - start
        size = path.stat().st_size
        print(f"read {prefix.shape[1]:,} tokens in {once:.2f} s; state of {size:,} B")
        # The KV cache: a key and a value of the width of the model per token and layer.
        keys = 2 * prefix.shape[1] * model.config.n_layer * model.config.hidden_size * 4
        print(f"  KV cache of a softmax model as large: {keys:,} B")

        start = time.perf_counter()
        state = model.load_state(path)
        state.batch_repeat_interleave(n)
        forked = time.perf_counter() - start
        print(f"loaded it and forked it {n} ways in {forked:.3f} s; now {state.n_bytes:,} B")

    start = time.perf_counter()
    written = sample(model, prefix[:, -1:].expand(n, 1), state, settings)
    sampled = time.perf_counter() - start
    print(f"wrote {n} x {settings.tokens} tokens in {sampled:.2f} s")

    few = min(n, 8)
    start = time.perf_counter()
    read(model, prefix[:, :-1].expand(few, -1))
    reading = (time.perf_counter() - start) / few
    one = (once + forked + sampled) / n
    again = reading + sampled / n
    print(f"a roll-out took {1e3 * one:.1f} ms, the one reading shared among all of them;")
    print(f"  had each read the text itself, in batches of {few}: {1e3 * again:.1f} ms")
    return [tokenizer.decode(row) for row in written.tolist()]


def make_model(run: Path | None) -> tuple[LeapformerForCausalLM, TextTokenizer]:
    """The model of a run, or a fresh one that reads bytes; either keeps a state."""
    if run is not None:
        model, tokenizer = load_model(run)
        if not isinstance(model, LeapformerForCausalLM):
            raise SystemExit(f"{run} holds a {model.config.model_type}, which keeps no state")
        return model, tokenizer
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = LeapConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=128,
        n_layer=6,
        position_embedding="none",
        pad_token_id=tokenizer.eos_id,
    )
    return LeapForCausalLM(config).eval(), tokenizer


@torch.no_grad()
def read(model: LeapformerForCausalLM, ids: Tensor) -> StateCache:
    """What the model keeps of some texts."""
    return model(ids, use_cache=True, logits_to_keep=1).past_key_values


def sample(
    model: LeapformerForCausalLM, last: Tensor, state: StateCache, settings: Settings
) -> Tensor:
    """Continue each row from its state and its last token, `[rows, 1]`, by chance."""
    set_seed(0)
    n_read = state.get_seq_length()
    ids = model.generate(
        last,
        past_key_values=state,
        attention_mask=last.new_ones(len(last), n_read + 1),
        max_new_tokens=settings.tokens,
        do_sample=True,
        temperature=settings.temperature,
        top_k=0,
        eos_token_id=None,
    )
    return ids[:, 1:]


if __name__ == "__main__":
    main(tyro.cli(Settings))
