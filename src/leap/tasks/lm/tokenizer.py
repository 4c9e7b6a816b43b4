"""Text to tokens and back: bytes, a SentencePiece or tokenizers file, or one trained on the text.

All of them are Hugging Face tokenizers, saved beside the model for `AutoTokenizer` to find. A
document ends with the end-of-text token. Where a tokenizer cannot spell a line's end
(SentencePiece takes it for a space), each line ends with that token instead, as in LEAP's own
experiments.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast, T5Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from leap.errors import ConfigError, FileError, first_line
from leap.runtime.text import TextCodec, chunks
from leap.tasks.sentencepiece import read_sentencepiece

END = "<|endoftext|>"
KNOWN_ENDS = (END, "</s>", "<eos>", "<|end_of_text|>", "<|eot_id|>", "[EOS]", "[SEP]")
SMALLEST_VOCABULARY = 257


class TextTokenizer(TextCodec):
    """A Hugging Face tokenizer as language modelling uses it.

    Args:
        hugging_face: a fast tokenizer with an end-of-text token.
    """

    def __init__(self, hugging_face: PreTrainedTokenizerFast) -> None:
        super().__init__(hugging_face.backend_tokenizer, hugging_face.eos_token_id)
        self.hugging_face = hugging_face
        self._is_bytes = self.vocab_size == 257 and self.encode("\0\xff").tolist() == [0, 195, 191]

    @property
    def vocab_size(self) -> int:
        """Number of different tokens."""
        return len(self.hugging_face)

    def encode(self, text: str) -> Tensor:
        """Tokens of some text, without an end."""
        return torch.from_numpy(self.tokens(text))

    def encode_documents(self, documents: Iterable[str]) -> Tensor:
        """Tokens of whole documents, each with an end."""
        end = torch.tensor([self.eos_id], dtype=torch.int32)
        tokens: list[Tensor] = []
        for text in documents:
            if self._is_bytes:
                found = torch.from_numpy(np.frombuffer(text.encode(), np.uint8).astype(np.int32))
            else:
                found = self.encode(text)
            tokens.append(found)
            if self.spells_line_ends or not text.endswith("\n"):
                tokens.append(end)
        return torch.cat(tokens) if tokens else end[:0]

    def save(self, folder: Path) -> None:
        """Write the tokenizer, for `load` or `AutoTokenizer` to read."""
        self.hugging_face.save_pretrained(str(folder))


def load_tokenizer(folder: Path) -> TextTokenizer:
    """The tokenizer that was saved to a folder."""
    try:
        found = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        raise FileError(f"no tokenizer in {folder} ({first_line(error)})") from error
    if not isinstance(found, PreTrainedTokenizerFast) or found.eos_token_id is None:
        raise FileError(f"the tokenizer in {folder} is not one that leap lm train leaves there")
    return TextTokenizer(found)


def make_tokenizer(
    kind: str = "bytes", train_size: int | None = None, documents: Iterable[str] = ()
) -> TextTokenizer:
    """A tokenizer by the settings of a run.

    Args:
        kind: "bytes", or the path of a SentencePiece (.model) or tokenizers (.json) file.
        train_size: train one with this number of tokens instead.
        documents: the text to train it on.
    """
    if train_size is not None:
        if kind != "bytes":
            raise ConfigError(
                f"tokenizer={kind} and train_tokenizer={train_size}: give one of them"
            )
        return train_tokenizer(documents, train_size)
    if kind == "bytes":
        return byte_tokenizer()
    path = Path(kind).expanduser()
    if not path.is_file():
        raise FileError(
            f"no tokenizer at {kind}; give 'bytes', or a SentencePiece (.model) or "
            "tokenizers (.json) file"
        )
    return _from_json(path) if path.suffix == ".json" else _from_sentencepiece(path)


def byte_tokenizer() -> TextTokenizer:
    """256 bytes and the end of a text: nothing to learn, and nothing that cannot be spelt."""
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _wrap(backend, END)


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Byte-level BPE of the pairs that are most frequent in a text."""
    if vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(
            f"train_tokenizer={vocab_size} is too small; there are 256 bytes and the end of a "
            f"text, so give {SMALLEST_VOCABULARY} or more"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    pieces = (chunk for text in documents for chunk in chunks(text))
    backend.train_from_iterator(pieces, trainer)
    if backend.get_vocab_size() < vocab_size:
        raise FileError(
            f"the text is too short to find {vocab_size} tokens in it; it has "
            f"{backend.get_vocab_size()}, so give train_tokenizer as much, or more text"
        )
    return _wrap(backend, END)


def _from_json(path: Path) -> TextTokenizer:
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:
        raise FileError(f"{path} is no tokenizers file ({first_line(error)})") from error
    ends = [name for name in KNOWN_ENDS if backend.token_to_id(name) is not None]
    if not ends:
        raise FileError(
            f"{path} has no end-of-text token; add one of {', '.join(KNOWN_ENDS)} to it"
        )
    return _wrap(backend, ends[0])


def _from_sentencepiece(path: Path) -> TextTokenizer:
    found = read_sentencepiece(path, extra="lm")
    spec = found.spec
    if found.merges is None and (spec.pad_id, spec.eos_id, spec.unk_id) == (0, 1, 2):
        # T5's layout; Hugging Face's T5 has 100 tokens more, for its pretraining.
        return TextTokenizer(
            T5Tokenizer(vocab=found.vocabulary, _spm_precompiled_charsmap=found.charsmap)
        )
    if spec.eos_id < 0:
        raise FileError(f"{path} has no end-of-text token; train it with eos_id")
    return _wrap(found.tokenizer(), found.piece(spec.eos_id), unk_token=found.piece(spec.unk_id))


def _wrap(backend: Tokenizer, end: str, **special: str) -> TextTokenizer:
    return TextTokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=backend,
            eos_token=end,
            bos_token=end,
            pad_token=end,
            clean_up_tokenization_spaces=False,
            **special,
        )
    )
