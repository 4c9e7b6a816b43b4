"""Sound and text for a speech translation model, by one object that Hugging Face can save."""

from typing import Any

from transformers import BatchFeature, PreTrainedTokenizerFast, ProcessorMixin

from leap.errors import InputError
from leap.models.fbank import LeapformerFeatureExtractor

IGNORED = -100
"""A label that the loss leaves out, as everywhere in Hugging Face."""


class LeapformerProcessor(ProcessorMixin):
    """Makes `input_features` of sound, `labels` of text, and text of what was generated.

    Args:
        feature_extractor: for the sound.
        tokenizer: for the text.
    """

    feature_extractor: LeapformerFeatureExtractor
    tokenizer: PreTrainedTokenizerFast

    def __init__(
        self, feature_extractor: LeapformerFeatureExtractor, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        super().__init__(feature_extractor, tokenizer)

    def __call__(
        self,
        audio: Any = None,
        text: str | list[str] | None = None,
        *,
        sampling_rate: int | None = None,
        return_tensors: str | None = None,
        padding: bool | str = True,
    ) -> BatchFeature:
        """What the model takes: of sound, of its translation, or of both.

        Labels are -100 where shorter translations were filled up, which the loss leaves out.

        Args:
            audio: one recording or several, as `LeapformerFeatureExtractor` takes them.
            text: one translation or several.
            sampling_rate: of the recordings, to be checked.
            return_tensors: "pt" or "np".
            padding: of the shorter ones.
        """
        if audio is None and text is None:
            raise InputError("give audio, text, or both")
        found = BatchFeature()
        if audio is not None:
            found = self.feature_extractor(
                audio, sampling_rate, padding=padding, return_tensors=return_tensors
            )
        if text is not None:
            rows = [text] if isinstance(text, str) else text
            written = self.tokenizer(rows, padding=padding)
            labels = [
                [piece if is_real else IGNORED for piece, is_real in zip(*row, strict=True)]
                for row in zip(written["input_ids"], written["attention_mask"], strict=True)
            ]
            is_one = isinstance(text, str) and return_tensors is None
            found.update(BatchFeature({"labels": labels[0] if is_one else labels}, return_tensors))
        return found
