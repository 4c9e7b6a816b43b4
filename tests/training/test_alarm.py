"""Promises of the alarm: it tells of learned parts that say nothing, once, and else is quiet."""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from leap.layers import DecayGate, LeapAttention, LearnedProportion
from leap.layers.gate import ForgetGate
from leap.layers.travel import Rotation, Steps
from leap.models import (
    LeapConfig,
    LeapForCausalLM,
    LeapformerConfig,
    LeapformerForCausalLM,
    LeapformerForSequenceClassification,
)
from leap.training import Recipe, RunFolder, fit
from leap.training.alarm import find_fault, read_off

RECIPE = Recipe(steps=4, batch=4, evaluate_every=2, log_every=1, warmup=0.0, learning_rate=1e-3)
SMALL = {"vocab_size": 11, "hidden_size": 16, "n_head": 2, "n_positions": 32}


class Counting(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        row = (torch.arange(17) * (1 + index)) % 11
        return {"input_ids": row[:-1], "labels": row[:-1], "shift_labels": row[1:]}


def train(model, path):
    notes = []
    folder = RunFolder(path, {})
    folder.create({})

    def progress(status):
        if status.note is not None:
            notes.append(status.note)

    return notes, fit(model, Counting(), Counting(), RECIPE, folder, progress)


def make_model(**settings):
    torch.manual_seed(0)
    if settings.get("attention") == "leap":
        return LeapForCausalLM(LeapConfig(**SMALL, n_layer=2))
    return LeapformerForCausalLM(LeapformerConfig(**SMALL, n_layer=2, **settings))


def freeze(module):
    """Stop a net at the same number for every token."""
    for parameter in module.net[-1].parameters():
        parameter.requires_grad_(False)
    nn.init.zeros_(module.net[-1].weight)


HEALTHY = {
    "travelled": {"proportion": "travelled", "gate": "head"},
    "learned": {"proportion": "learned", "gate": "channel"},
    "leap": {"attention": "leap"},
    "gated-delta": {"attention": "gated-delta"},
    "selective": {"position_embedding": "selective"},
    "softmax": {"attention": "softmax", "gate": "head"},
    "constant-steps": {"proportion": "travelled", "constant_steps": True},
}


@pytest.mark.parametrize("settings", HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_model_trains_without_a_word(settings, tmp_path):
    assert train(make_model(**settings), tmp_path)[0] == []


def test_constant_steps_are_told_of_once_with_their_layer(tmp_path):
    model = make_model(proportion="travelled")
    freeze(model.model.layers[1].block.attention.steps)
    notes, fitted = train(model, tmp_path)
    assert len(notes) == 1  # Of two evaluations.
    assert notes[0].startswith("after 2 steps, layer 1: all steps are equally long (1.000)")
    assert "try proportion_hidden=16" in notes[0]
    spreads = [row["spread"] for row in fitted.history if "eval_loss" in row]
    assert len(spreads) == 2
    for spread in spreads:
        assert spread["model.layers.1.block.attention.steps"] == 0
        assert spread["model.layers.0.block.attention.steps"] > 0.001


def test_a_flat_focus_is_told_of(tmp_path):
    model = make_model(attention="leap")
    focus = model.model.layers[0].block.attention.f_proj
    nn.init.zeros_(focus.weight).requires_grad_(False)
    notes, _ = train(model, tmp_path)
    assert len(notes) == 1 and "layer 0: the focus is the same for all tokens" in notes[0]


UNEVEN = torch.linspace(0.2, 0.8, 50)[:, None]
FAULTS = [
    (LearnedProportion(4), UNEVEN, None),
    (LearnedProportion(4), torch.full((50, 2), 0.4), "proportions are the same for all tokens"),
    (LearnedProportion(4), UNEVEN * 1e-3, "all proportions are 0.001"),
    (LearnedProportion(4), 1 - UNEVEN * 1e-3, "all proportions are 1.000"),
    # Heads may differ: one that says something is enough.
    (LearnedProportion(4), torch.cat([UNEVEN, torch.ones(50, 1)], dim=1), None),
    (Steps(4, 2), UNEVEN, None),
    (Steps(4, 2), UNEVEN * 1e-4, "no step is longer than 8e-05"),
    (Steps(4, 2), torch.ones(50, 2), "all steps are equally long"),
    (ForgetGate(4, 2), UNEVEN, None),
    (ForgetGate(4, 2), 1 - UNEVEN / 1024, None),  # As long as fresh gates remember.
    (ForgetGate(4, 2), 1 - UNEVEN * 1e-6, "all gates are 1, and forget nothing over 50 tokens"),
    (ForgetGate(4, 2), UNEVEN * 1e-4, "all gates are 0"),
    (DecayGate(4, 2), torch.full((50, 2), 0.9), "gates are the same for all tokens"),
    (LeapAttention(8, 2), UNEVEN, None),
    (LeapAttention(8, 2), torch.full((50, 2), 3.0), "the focus is the same"),
    (LeapAttention(8, 2), 20 * torch.eye(50)[:, :2], "one token has more than 99% of the focus"),
    (Rotation(8, 2, 4), UNEVEN, None),
    (Rotation(8, 2, 4), torch.zeros(50, 2), "all tokens turn alike"),
    (LearnedProportion(4), torch.full((1, 2), 0.4), None),  # Of one token nothing can be said.
]


@pytest.mark.parametrize("module, values, words", FAULTS)
def test_what_is_wrong_is_named(module, values, words):
    fault = find_fault(module, values)
    assert fault is None if words is None else words in fault and "try" in fault


def test_pads_are_not_looked_at():
    config = LeapformerConfig(**SMALL, n_layer=1, proportion="learned", num_labels=2)
    model = LeapformerForSequenceClassification(config)
    ids = torch.tensor([[1, 2, 3, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    for _, values in read_off(model, batch).values():
        assert values.shape == (3, 2)


def test_looking_changes_neither_the_mode_nor_what_is_drawn_next():
    model = make_model(proportion="travelled").train()
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    assert read_off(model, {"input_ids": torch.arange(9)[None]})
    assert model.training and torch.equal(torch.rand(3), expected)
