"""Small models of every kind."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from leap.models import LeapConfig, LeapForCausalLM, LeapformerConfig, LeapformerForCausalLM

KINDS = {
    "leapformer": {},
    "leapformer-rotary": {"position_embedding": "rotary"},
    "leapformer-learned": {"position_embedding": "learned"},
    "leapformer-travelled": {"proportion": "travelled"},
    "leapformer-paper": {"proportion": "learned"},
    "leapformer-none": {"proportion": "learned", "position_embedding": "none"},
    "leapformer-gated": {"proportion": "learned", "gate": "head"},
    "leapformer-convolved": {"proportion": "learned", "gate": "channel", "convolution": 4},
    "leapformer-norm": {"proportion": "learned", "normaliser": "norm"},
    "cosformer": {"attention": "cosformer"},
    "linear": {"attention": "linear", "feature": "elu_plus_one"},
    "gated-delta": {"attention": "gated-delta", "position_embedding": "none"},
    "gated-delta-hybrid": {"attention": ["gated-delta", "softmax"]},
    "softmax": {"attention": "softmax"},
    "softmax-rotary": {"attention": "softmax", "position_embedding": "rotary"},
    "softmax-gated": {"attention": "softmax", "gate": "head", "convolution": 4},
    "hybrid": {
        "attention": ["leap", "leapformer", "softmax"],
        "window_sizes": [4, None, None],
        "n_layer": 3,
    },
    "leap": {"leap": True},
    "leap-1.0": {"leap": True, "formulation": "leap-1.0", "window_sizes": [12, None]},
    "leap-0.1": {"leap": True, "formulation": "leap-0.1"},
    "leap-elu": {"leap": True, "formulation": "leap-elu"},
    "leap-fastformer": {"leap": True, "formulation": "fastformer"},
    "leap-convolved": {"leap": True, "convolution": 3},
    "leap-global": {"leap": True, "use_local_att": False},
}


def build(kind, seed=0, scale=8, **changes):
    """A tiny model, in double precision, with weights large enough to have opinions."""
    options = {
        "vocab_size": 61,
        "hidden_size": 16,
        "n_positions": 128,
        "n_layer": 2,
        "n_head": 2,
        "hidden_dropout_prob": 0.0,
        "pad_token_id": 0,
        "eos_token_id": None,
    } | KINDS[kind]
    leap = options.pop("leap", False)
    torch.manual_seed(seed)
    if leap:
        model = LeapForCausalLM(LeapConfig(**options | changes))
    else:
        model = LeapformerForCausalLM(LeapformerConfig(**options | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return model.double().eval()


@pytest.fixture(params=KINDS)
def model(request):
    """Each kind of model in turn."""
    return build(request.param)


@pytest.fixture
def make_model():
    """To make one of a certain kind."""
    return build


@pytest.fixture
def assert_parts_teach_as_a_whole(tmp_path, shapes_unchecked):
    def check(make_model, rows):
        """Train on batches of 4, whole and one by one: the same losses, which fall."""
        losses = []
        for parts in (1, 4):
            trainer = Trainer(
                model=make_model(),
                args=TrainingArguments(
                    tmp_path / str(parts),
                    max_steps=6,
                    per_device_train_batch_size=4 // parts,
                    gradient_accumulation_steps=parts,
                    learning_rate=1e-2,
                    logging_steps=1,
                    remove_unused_columns=False,
                    report_to=[],
                    disable_tqdm=True,
                    use_cpu=True,
                ),
                train_dataset=rows,
            )
            trainer.train()
            losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
        assert losses[1] == pytest.approx(losses[0], rel=1e-3)
        assert losses[0][-1] < losses[0][0]

    return check
