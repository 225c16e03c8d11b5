"""Text to token ids and back, whatever the vocabulary came in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from fourfold.errors import InvalidRequestError
from fourfold.text.detokenizer import Detokenizer
from fourfold.text.vocabulary import Vocabulary
from fourfold.types import ModelInfo

if TYPE_CHECKING:
    from fourfold.weights.source import WeightSource


class Encoder(Protocol):
    """Splits text into tokens; adds nothing at either end."""

    def encode(self, text: str, parse_special: bool) -> list[int]: ...


class TokenizerSpec(msgspec.Struct, frozen=True):
    """What a tokenizer does around the text, and what its model names.

    prefix_ids, suffix_ids: put before and after a text when special tokens are asked for.
    eos_ids: every id that ends an answer: union of config, generation config and tokenizer.
    special_tokens: texts by role ("bos_token", "eos_token", ...), for chat templates.
    chat_templates: Jinja sources by name; "default" is the one without a name.
    strip_leading_space: decoding drops one space at the beginning, which encoding had put there.
    """

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = msgspec.field(default_factory=dict)
    chat_templates: Mapping[str, str] = msgspec.field(default_factory=dict)
    strip_leading_space: bool = False


class Tokenizer:
    """A model's tokenizer. Threads may share one."""

    def __init__(self, vocabulary: Vocabulary, encoder: Encoder, spec: TokenizerSpec) -> None:
        self.vocabulary = vocabulary
        self.spec = spec
        self._encoder = encoder
        self.token_bytes = vocabulary.token_bytes
        self.token_text = vocabulary.token_text

    @property
    def vocab_size(self) -> int:
        """One above the highest id that has a token; logits may have more rows than that."""
        return len(self.vocabulary)

    @property
    def bos_id(self) -> int | None:
        return self.spec.bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.spec.eos_ids

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens: left out of decoded text on request."""
        return self.vocabulary.special_ids

    @property
    def add_bos(self) -> bool:
        return self.spec.bos_id is not None and self.spec.bos_id in self.spec.prefix_ids

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the default chat template, or None if the model has none."""
        return self.spec.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        add_special_tokens: also what the model wants around a text, mostly BOS. A text that already begins
            with BOS (a rendered chat template) does not get a second one.
        parse_special: control tokens written out in the text become their ids; otherwise they are plain text.
        Raises InvalidRequestError if the text has a lone surrogate.
        """
        ids = self._encoder.encode(text, parse_special)
        if not add_special_tokens:
            return ids
        prefix = self.spec.prefix_ids
        if prefix and ids[: len(prefix)] == list(prefix):
            prefix = ()
        return [*prefix, *ids, *self.spec.suffix_ids]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Raises InvalidRequestError for an id without a token.
        """
        detokenizer = Detokenizer(self, skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.finish()

    def check_ids(self, ids: Iterable[int]) -> None:
        """Raises InvalidRequestError naming the first id that has no token."""
        size = self.vocab_size
        for id in ids:
            if not 0 <= id < size:
                raise InvalidRequestError(
                    f"token id {id} does not exist; ids run from 0 to {size - 1}", "prompt"
                )


def utf8(text: str) -> bytes:
    """UTF-8 of text from outside. Raises InvalidRequestError if it has a lone surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"text has a lone surrogate {text[error.start]!r} at character {error.start}; "
            "send valid Unicode (a pair of \\u escapes, or the character itself)"
        ) from error


def load_model_tokenizer(model: ModelInfo) -> Tokenizer:
    """The tokenizer that belongs to a loaded model. Raises LoadError."""
    return load_tokenizer(Path(model.path))


def load_tokenizer(source: WeightSource | Path) -> Tokenizer:
    """Tokenizer of a checkpoint: open, or the path of a GGUF file or of a Hugging Face directory.

    Of a GGUF file given by path, only the metadata is read. Raises LoadError naming the file and the key that
    is missing, damaged or unknown.
    """
    # Imported here because either one brings in a library that the other does not need.
    path = source if isinstance(source, Path) else source.path
    if path.is_dir():
        from fourfold.text.hf import load_hf_tokenizer

        return load_hf_tokenizer(path)
    from fourfold.text.gguf import load_gguf_tokenizer

    if not isinstance(source, Path):
        return load_gguf_tokenizer(source.metadata, path)
    from fourfold.weights.gguf_header import read_header

    return load_gguf_tokenizer(read_header(path)[0].metadata, path)
