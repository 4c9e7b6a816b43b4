"""A SentencePiece file as a fast tokenizer of Hugging Face, with the same subwords and ids."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import SentencePieceExtractor

from leap.errors import FileError, first_line
from leap.extras import install_command


@dataclass(frozen=True)
class SentencePiece:
    """What a SentencePiece file holds."""

    path: Path
    proto: Any
    """The file's own description of itself."""
    vocabulary: Any
    """Subwords with their scores (unigram), or with their ids (BPE)."""
    merges: Any | None
    """Of BPE, in order; None for unigram."""
    charsmap: bytes | None
    """The normaliser's table."""

    @property
    def spec(self) -> Any:
        """How the file was trained, the ids of its special subwords among it."""
        return self.proto.trainer_spec

    def piece(self, index: int) -> str:
        """A subword by its id."""
        return self.proto.pieces[index].piece

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, which takes all white space for one space, as SentencePiece does."""
        if self.merges is not None:
            model: models.Model = models.BPE(
                self.vocabulary,
                self.merges,
                unk_token=self.piece(self.spec.unk_id),
                fuse_unk=True,
                byte_fallback=self.spec.byte_fallback,
            )
        else:
            model = models.Unigram(self.vocabulary, self.spec.unk_id, self.spec.byte_fallback)
        backend = Tokenizer(model)
        if self.charsmap:
            backend.normalizer = normalizers.Precompiled(self.charsmap)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
        )
        backend.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
        )
        return backend


def read_sentencepiece(path: Path, extra: str) -> SentencePiece:
    """Read a SentencePiece file.

    Args:
        path: of the file.
        extra: of this package that installs what reading it takes, for the error that says so.
    """
    try:
        extractor = SentencePieceExtractor(str(path))
        found: Any = extractor.extract(None)
    except ImportError as error:
        raise FileError(
            f"{path} needs sentencepiece and protobuf: {install_command(extra)}"
        ) from error
    except Exception as error:
        raise FileError(f"{path} is no SentencePiece file ({first_line(error)})") from error
    if not extractor.proto.pieces:
        raise FileError(f"{path} is no SentencePiece file (it holds no subwords)")
    return SentencePiece(
        path=path,
        proto=extractor.proto,
        vocabulary=found["vocab"],
        merges=found.get("merges"),
        charsmap=found["_spm_precompiled_charsmap"],
    )
