"""Words to subwords and back, one vocabulary for both languages, also while the words still arrive.

The subwords are SentencePiece's, which never reach over white space: encoding word by word gives
the subwords of the whole sentence. A word that is being written is complete when the next one
begins.

Special subwords come first, in fairseq's order: bos 0, pad 1, eos 2, unk 3.
"""

import io
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from leap.errors import ConfigError, FileError, first_line
from leap.extras import install_command
from leap.runtime.streaming.vocabulary import BOS, EOS, PAD, SPACE, SPECIAL, UNK, Subwords
from leap.tasks.sentencepiece import read_sentencepiece

SENTENCEPIECE = "sentencepiece.model"
"""The name of the SentencePiece file in a vocabulary's folder, for other tools."""


class Vocabulary(Subwords):
    """Subwords, as translation uses them.

    Args:
        hugging_face: the same as a tokenizer for Hugging Face, whose `__call__` adds the end.
        model: the SentencePiece file's bytes.
    """

    def __init__(self, hugging_face: PreTrainedTokenizerFast, model: bytes) -> None:
        super().__init__(hugging_face.backend_tokenizer)
        self.hugging_face = hugging_face
        self.model = model

    def save(self, folder: Path) -> None:
        """Write the vocabulary, for `load_vocabulary`, `AutoTokenizer` or SentencePiece to read."""
        self.hugging_face.save_pretrained(str(folder))
        (folder / SENTENCEPIECE).write_bytes(self.model)


def train_vocabulary(
    texts: Iterable[str], size: int = 6000, kind: Literal["bpe", "unigram"] = "bpe"
) -> Vocabulary:
    """Find the subwords that spell some text best; give it both languages for a joint vocabulary.

    Args:
        texts: sentences.
        size: number of subwords, the special ones among them. A text too small for that gets
            as many as can be found in it.
        kind: of SentencePiece.
    """
    try:
        import sentencepiece
    except ImportError as error:
        raise ConfigError(
            f"a vocabulary needs sentencepiece: {install_command('simul')}"
        ) from error
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise FileError("there is no text to make a vocabulary of")
    smallest = len(set(" ".join(texts))) + len(SPECIAL)
    if size < smallest:
        raise ConfigError(
            f"vocabulary={size} is too small: the text alone has {smallest - len(SPECIAL)} "
            f"different characters; give {smallest} or more"
        )
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            vocab_size=size,
            hard_vocab_limit=False,
            model_type=kind,
            character_coverage=1.0,
            bos_id=BOS,
            pad_id=PAD,
            eos_id=EOS,
            unk_id=UNK,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ConfigError(
            f"no vocabulary of {size} subwords can be made of this text ({first_line(error)})"
        ) from error
    with TemporaryDirectory() as folder:
        path = Path(folder) / SENTENCEPIECE
        path.write_bytes(model.getvalue())
        return read_vocabulary(path)


def read_vocabulary(path: Path) -> Vocabulary:
    """The vocabulary in a SentencePiece file.

    Its special subwords must be as ours are, and a space may only be in front of the others: words
    are told by that.
    """
    found = read_sentencepiece(path, extra="simul")
    spec = found.spec
    ids = (spec.bos_id, spec.pad_id, spec.eos_id, spec.unk_id)
    if ids != (BOS, PAD, EOS, UNK):
        raise FileError(
            f"{path} has bos, pad, eos and unk at {', '.join(map(str, ids))}; train one with them "
            f"at {BOS}, {PAD}, {EOS} and {UNK}"
        )
    if spec.byte_fallback:
        raise FileError(
            f"{path} spells rare characters in bytes, which no word can be put together of; train "
            "one without byte_fallback"
        )
    for piece in (each.piece for each in found.proto.pieces):
        if SPACE in piece.lstrip(SPACE):
            raise FileError(
                f"{path} has subwords with a space elsewhere than in front, such as {piece}; train "
                "one with split_by_whitespace and without treat_whitespace_as_suffix"
            )
    backend = found.tokenizer()
    names = dict(zip(("bos", "pad", "eos", "unk"), map(found.piece, ids), strict=True))
    backend.post_processor = TemplateProcessing(
        single=f"$A {names['eos']}", special_tokens=[(names["eos"], EOS)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        **{f"{kind}_token": name for kind, name in names.items()},
    )
    return Vocabulary(tokenizer, path.read_bytes())


def load_vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary that was saved to a folder."""
    path = folder / SENTENCEPIECE
    try:
        found = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        model = path.read_bytes()
    except Exception as error:
        raise FileError(f"no vocabulary in {folder} ({first_line(error)})") from error
    if not isinstance(found, PreTrainedTokenizerFast) or found.eos_token_id != EOS:
        raise FileError(f"the tokenizer in {folder} is not one that leap simul prepare makes")
    return Vocabulary(found, model)
