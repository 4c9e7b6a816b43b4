"""Models that know nothing, each a moment to make, for the page to show."""

import json
import subprocess
import sys

import pytest
import torch

SIZES = {"hidden_size": 16, "n_head": 2, "n_layer": 2}
TEXT = "three hundred and nine five thousand sixty-eight (again) seven one"
TARGETS = "dreihundertneun fünftausend achtundsechzig (noch einmal) sieben eins"


@pytest.fixture(scope="session")
def lm_run(tmp_path_factory):
    """The folder of a language model of bytes."""
    from leap.models import LeapformerConfig, LeapformerForCausalLM
    from leap.tasks.lm.tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_id)
    torch.manual_seed(0)
    model = LeapformerForCausalLM(
        LeapformerConfig(
            vocab_size=257,
            attention=["leapformer", "leap"],
            window_sizes=[None, 4],
            position_embedding="none",
            tokenizer_fingerprint=tokenizer.fingerprint,
            **ends,
            **SIZES,
        )
    )
    for parameter in model.parameters():
        parameter.data.mul_(3)  # Else all tokens are alike.
    model.lm_head.weight.data[tokenizer.eos_id] = 0
    folder = tmp_path_factory.mktemp("runs") / "writer"
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="session")
def exported(tmp_path_factory, lm_run):
    """The same, exported: in a process of its own, as shape checks stop tracing."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason=f"exporting needs {name}")
    folder = tmp_path_factory.mktemp("exported")
    text = folder / "text.txt"
    text.write_text("one two three four\n" * 40)
    output = folder / "exported-writer"
    given = ("--run", lm_run, "--output", output, "--data", text, "--tokens", 64)
    command = [sys.executable, "-m", "leap.cli", "export", *map(str, given)]
    subprocess.run(command, capture_output=True, text=True, check=True)
    return output


@pytest.fixture(scope="session")
def classifier(tmp_path_factory):
    """A folder with a classifier of texts."""
    from leap.models import LeapformerConfig, LeapformerForSequenceClassification
    from leap.tasks.lm.tokenizer import byte_tokenizer

    folder = tmp_path_factory.mktemp("runs") / "reviewer"
    torch.manual_seed(0)
    config = LeapformerConfig(
        vocab_size=257, n_positions=256, attention="leap", num_labels=2, **SIZES
    )
    model = LeapformerForSequenceClassification(config)
    for parameter in model.parameters():
        parameter.data.mul_(3)
    model.save_pretrained(folder)
    byte_tokenizer().save(folder)
    return folder


@pytest.fixture(scope="session")
def translation(tmp_path_factory):
    """A function that makes a translation model, of text or of speech."""
    from leap.models.fbank import LeapformerFeatureExtractor
    from leap.runtime.streaming.vocabulary import EOS
    from leap.tasks.simul.model import ModelConfig, build_model, save_model
    from leap.tasks.simul.vocabulary import train_vocabulary

    def make(kind):
        torch.manual_seed(3 if kind == "text" else 1)  # Both say more than one long word.
        vocabulary = train_vocabulary([TEXT, TARGETS], size=60)
        sizes = {"hidden_size": 16, "feed_forward_size": 16, "n_head": 2}
        config = ModelConfig(**sizes, n_layer=1, encoder_layers=1)
        is_speech = kind == "speech"
        extractor = LeapformerFeatureExtractor(mean=[12.0] * 80, std=[3.0] * 80)
        model = build_model(config, vocabulary, 80 if is_speech else None)
        for parameter in model.parameters():
            parameter.data.mul_(2)
        model.lm_head.weight.data[EOS] *= 1.2
        folder = tmp_path_factory.mktemp("runs") / f"{kind}-translator"
        save_model(model, vocabulary, extractor if is_speech else None, folder)
        return folder

    return make


@pytest.fixture(scope="session")
def translator(translation):
    return translation("text")


@pytest.fixture(scope="session")
def speech_translator(translation):
    return translation("speech")


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """A folder of benchmarks: one that grows with a length, one of two files, and none."""
    folder = tmp_path_factory.mktemp("benchmarks")
    speed = [
        {"mechanism": name, "length": n, "seconds": n * cost, "passes": passes, "turns": [1, 2]}
        for name, cost in (("softmax", 2), ("leap", 1))
        for n in (128, 256, 8192)
        for passes in ("forward", "forward+backward")
    ]
    content = {"machine": {"processor": "abacus <b>"}, "results": speed}
    for name, text in {
        "speed/results.json": json.dumps(content),
        "faith/one.json": json.dumps({"rows": [{"method": "a", "mean": 1.5}]}),
        "faith/two.json": json.dumps({"rows": [{"method": "a", "mean": 2.5}]}),
        "recall/results.json": json.dumps(
            {"rows": [{"model": "m", "accuracy": {"8": 1, "16": 0}}]}
        ),
        "other/results.json": json.dumps([1, 2]),
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder
