"""Models exported by the command, each once: a process of its own, as shape checks stop tracing."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

HYBRID = {
    "attention": ["leap", "gated-delta", "softmax", "leapformer", "cosformer", "leap"],
    "window_sizes": [4, None, None, None, None, None],
    "n_layer": 6,
    "convolution": 3,
    "position_embedding": "none",
    "n_positions": 4096,
}
"""Every kind of state."""
FADING = {
    "gate": "channel",
    "proportion": "travelled",
    "clocks": 2,
    "normaliser": "norm",
    "position_embedding": "learned",
    "n_positions": 96,
    "n_layer": 2,
}

TRANSLATORS = {
    "text": {
        "feature": "exp",
        "cross_attention": "leapformer,softmax",
        "cross_window": 8,
        "position_embedding": "alibi",
    },
    "speech": {"attention": "leapformer", "proportion": "travelled"},
}
SOURCE = "three hundred and nine five thousand sixty-eight (again) seven one"
TARGET = "dreihundertneun fünftausend achtundsechzig (noch einmal) sieben eins"


def leap_command(*arguments, check=True):
    """Run a command in a process of its own."""
    command = [sys.executable, "-m", "leap.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=check)


@pytest.fixture(scope="session")
def leap():
    return leap_command


@pytest.fixture(scope="session")
def save_lm():
    """Write a language model of bytes with weights drawn at random, and its tokenizer."""
    from leap.models import LeapformerConfig, LeapformerForCausalLM
    from leap.tasks.lm.tokenizer import byte_tokenizer

    def save(folder, **settings):
        tokenizer = byte_tokenizer()
        sizes = {"vocab_size": 257, "hidden_size": 32, "n_head": 4}
        tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_id)
        torch.manual_seed(0)
        model = LeapformerForCausalLM(
            LeapformerConfig(
                **sizes, **tokens, tokenizer_fingerprint=tokenizer.fingerprint, **settings
            )
        )
        for parameter in model.parameters():
            parameter.data.mul_(3)  # Else all tokens are alike.
        model.save_pretrained(folder)
        tokenizer.save(folder)

    return save


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """Real text to check exports by."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(Path(subprocess.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory, save_lm, text_file):
    """The folder of a model with every kind of state, that of its export, and what was said."""
    return _exported(tmp_path_factory, save_lm, text_file, HYBRID)


@pytest.fixture(scope="session")
def fading(tmp_path_factory, save_lm, text_file):
    """The same of a model with gates, clocks and learned positions."""
    return _exported(tmp_path_factory, save_lm, text_file, FADING)


def _exported(tmp_path_factory, save_lm, text_file, settings):
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason=f"exporting needs {name}")
    folder = tmp_path_factory.mktemp("lm")
    run, output = folder / "run", folder / "exported"
    save_lm(run, **settings)
    given = ("--run", run, "--output", output, "--data", text_file, "--tokens", 600)
    done = leap_command("export", *given)
    return run, output, done.stdout


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """The run and the export of a translation model that knows nothing, by its kind."""
    made = {}
    for name in ("onnx", "onnxscript", "onnxruntime", "sentencepiece", "kaldi_native_fbank"):
        pytest.importorskip(name, reason=f"exporting translation needs {name}")

    def folders_of(kind):
        if kind in made:
            return made[kind]
        from leap.models.fbank import LeapformerFeatureExtractor
        from leap.runtime.streaming.vocabulary import EOS
        from leap.tasks.simul.model import ModelConfig, build_model, save_model
        from leap.tasks.simul.vocabulary import train_vocabulary

        is_speech = kind == "speech"
        torch.manual_seed(1)
        vocabulary = train_vocabulary([SOURCE, TARGET], size=60)
        extractor = LeapformerFeatureExtractor(mean=[12.0] * 80, std=[3.0] * 80)
        sizes = {"hidden_size": 16, "feed_forward_size": 16, "n_head": 2}
        config = ModelConfig(**sizes, n_layer=2, encoder_layers=2, **TRANSLATORS[kind])
        model = build_model(config, vocabulary, 80 if is_speech else None)
        for parameter in model.parameters():
            parameter.data.mul_(2)
        model.lm_head.weight.data[EOS] *= 1.2
        run = tmp_path_factory.mktemp(kind)
        save_model(model, vocabulary, extractor if is_speech else None, run / "run")
        done = leap_command("export", "--run", run / "run", "--output", run / "exported")
        assert "largest difference from torch" in done.stdout
        made[kind] = run / "run", run / "exported"
        return made[kind]

    return folders_of
