import numpy as np
import pytest
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoFeatureExtractor, AutoProcessor, PreTrainedTokenizerFast

from leap.errors import InputError
from leap.models import LeapformerFeatureExtractor, LeapformerProcessor

pytest.importorskip("kaldi_native_fbank", reason="kaldi-native-fbank is not installed")


@pytest.fixture
def processor():
    backend = Tokenizer(models.WordLevel({"<pad>": 0, "eins": 1, "zwei": 2}, unk_token="<pad>"))
    backend.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")
    return LeapformerProcessor(LeapformerFeatureExtractor(mean=[1.0] * 80), tokenizer)


def test_sound_and_translation_become_what_the_model_takes(processor):
    sound = [np.zeros(1600, np.float32), np.zeros(3200, np.float32)]
    batch = processor(sound, ["eins", "eins zwei"], sampling_rate=16000, return_tensors="pt")
    assert batch["input_features"].shape == (2, 20, 80)
    assert batch["attention_mask"].sum(dim=1).tolist() == [10, 20]
    assert batch["labels"].tolist() == [[1, -100], [1, 2]]
    assert processor(text=["eins", "eins zwei"])["labels"] == [[1, -100], [1, 2]]
    assert processor(text="zwei", return_tensors="np")["labels"].tolist() == [[2]]
    assert processor(text="zwei")["labels"] == [2]
    assert set(processor(sound[0])) == {"input_features", "attention_mask"}
    assert set(processor(text="zwei")) == {"labels"}


def test_it_gives_text_of_what_was_generated(processor):
    assert processor.batch_decode([[1, 2], [2, 0]], skip_special_tokens=True) == [
        "eins zwei",
        "zwei",
    ]


def test_auto_classes_find_what_was_saved(processor, tmp_path):
    processor.save_pretrained(tmp_path)
    again = AutoProcessor.from_pretrained(tmp_path)
    assert isinstance(again, LeapformerProcessor)
    assert again.feature_extractor.mean == [1.0] * 80
    assert again.tokenizer("eins").input_ids == [1]
    extractor = AutoFeatureExtractor.from_pretrained(tmp_path)
    assert isinstance(extractor, LeapformerFeatureExtractor)


def test_nothing_is_refused(processor):
    with pytest.raises(InputError, match="give audio, text, or both"):
        processor()
