"""Tokenizers from the vocabulary inside a GGUF file (keys tokenizer.ggml.*)."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from fourfold.errors import LoadError
from fourfold.text.tokenizer import Encoder, Tokenizer, TokenizerSpec
from fourfold.text.vocabulary import TokenKind, Vocabulary, positions
from fourfold.weights.metadata import get_bool, get_floats, get_int, get_ints, get_str, get_strings

_PREFIX = "tokenizer.ggml."
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

END_OF_TURN = frozenset(
    {
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>",
        "<|end_of_text|>", "<EOT>", "<|EOT|>", "<｜end▁of▁sentence｜>", "<end_of_utterance>",
    }
)  # fmt: skip
"""Control tokens that end an answer by their name. GGUF has no generation config, and most files name only
one EOS: Gemma's names <eos>, while its turns end in <end_of_turn>."""


def load_gguf_tokenizer(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """Raises LoadError naming the file and the key that is missing, damaged or unknown."""
    return _Loader(metadata, path).load()


class _Loader:
    """Reads and checks the keys once; the two kinds of vocabulary differ in how they encode."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self._meta = metadata
        self._path = path
        self._model = get_str(metadata, _PREFIX + "model")
        if self._model not in ("gpt2", "llama"):
            self._fail(
                "model", f"is {self._model!r}; known are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece)"
            )
        texts = get_strings(metadata, _PREFIX + "tokens")
        if not texts:
            self._fail("tokens", "is empty")
        kinds = self._read_kinds(len(texts))
        # Converters fill ids that the model has logits for, but no token, with placeholders at the end.
        size = len(kinds.rstrip(bytes((TokenKind.UNUSED, TokenKind.UNDEFINED))))
        if size == 0:
            self._fail("token_type", "marks every token as unused")
        self._texts = texts[:size] if size < len(texts) else texts
        self._kinds = kinds[:size]
        self._check_byte_tokens()

    def load(self) -> Tokenizer:
        encoder, add_bos = self._bpe() if self._model == "gpt2" else self._spm()
        vocabulary = Vocabulary(
            self._texts, self._kinds, "byte-level" if self._model == "gpt2" else "sentencepiece"
        )
        ids = {role: self._token_id(name) for role, name in _ROLES.items()}
        bos, eos = ids["bos_token"], ids["eos_token"]
        prefix = self._added("add_bos_token", "bos_token_id", bos, add_bos)
        suffix = self._added("add_eos_token", "eos_token_id", eos, False)
        spec = TokenizerSpec(
            bos_id=bos,
            eos_ids=self._eos_ids(),
            prefix_ids=prefix,
            suffix_ids=suffix,
            special_tokens={role: self._texts[id] for role, id in ids.items() if id is not None},
            chat_templates=self._chat_templates(),
            strip_leading_space=self._model == "llama" and self._space_prefix(),
        )
        return Tokenizer(vocabulary, encoder, spec)

    def _fail(self, key: str, problem: str) -> None:
        raise LoadError(f"{self._path}: {_PREFIX}{key} {problem}")

    def _read_kinds(self, count: int) -> bytes:
        kinds = get_ints(self._meta, _PREFIX + "token_type")
        if len(kinds) != count:
            self._fail("token_type", f"has {len(kinds)} entries, but there are {count} tokens")
        most = max(TokenKind)
        if min(kinds) < 0 or max(kinds) > most:
            at = next(at for at, kind in enumerate(kinds) if not 0 <= kind <= most)
            self._fail("token_type", f"gives token {at} the type {kinds[at]}; types run from 0 to {most}")
        return bytes(kinds.tolist())

    def _check_byte_tokens(self) -> None:
        for id in positions(self._kinds, TokenKind.BYTE):
            text = self._texts[id]
            try:
                fine = len(text) == 6 and text[:3] == "<0x" and text[5] == ">" and int(text[3:5], 16) >= 0
            except ValueError:
                fine = False
            if not fine:
                self._fail(
                    "tokens", f"has {text!r} as byte token {id}; byte tokens are written <0x00> to <0xFF>"
                )

    def _token_id(self, name: str) -> int | None:
        key = f"{name}_token_id"
        if _PREFIX + key not in self._meta:
            return None
        id = get_int(self._meta, _PREFIX + key)
        if not 0 <= id < len(self._texts):
            self._fail(key, f"is {id}, but token ids run from 0 to {len(self._texts) - 1}")
        return id

    def _added(self, flag: str, id_key: str, id: int | None, default: bool) -> tuple[int, ...]:
        wanted = get_bool(self._meta, _PREFIX + flag, default)
        if not wanted:
            return ()
        if id is None:
            if _PREFIX + flag in self._meta:
                self._fail(id_key, f"is missing, but {_PREFIX}{flag} is true")
            return ()
        return (id,)

    def _eos_ids(self) -> tuple[int, ...]:
        found = {self._token_id(name) for name in ("eos", "eot", "eom")}
        for kind in (TokenKind.CONTROL, TokenKind.USER_DEFINED):
            found.update(id for id in positions(self._kinds, kind) if self._texts[id] in END_OF_TURN)
        return tuple(sorted(id for id in found if id is not None))

    def _chat_templates(self) -> dict[str, str]:
        key = "tokenizer.chat_template"
        templates = {}
        if key in self._meta:
            templates["default"] = get_str(self._meta, key)
        for name in self._meta:
            if name.startswith(key + "."):
                templates[name.removeprefix(key + ".")] = get_str(self._meta, name)
        return templates

    def _bpe(self) -> tuple[Encoder, bool]:
        from fourfold.text.bpe import BpeEncoder
        from fourfold.text.pretokenizers import PRE_TOKENIZERS

        name = get_str(self._meta, _PREFIX + "pre")
        pre = PRE_TOKENIZERS.get(name)
        if pre is None:
            raise LoadError(
                f"{self._path}: {_PREFIX}pre names the pre-tokenizer {name!r}; known are "
                f"{', '.join(sorted(PRE_TOKENIZERS))}"
            )
        merges = get_strings(self._meta, _PREFIX + "merges")
        try:
            return BpeEncoder(self._texts, self._kinds, merges, pre), pre.add_bos
        except ValueError as error:
            raise LoadError(f"{self._path}: {_PREFIX}merges does not fit {_PREFIX}tokens: {error}") from error

    def _space_prefix(self) -> bool:
        return get_bool(self._meta, _PREFIX + "add_space_prefix", True)

    def _spm(self) -> tuple[Encoder, bool]:
        from fourfold.text.spm import SpmEncoder

        scores = get_floats(self._meta, _PREFIX + "scores")
        if len(scores) < len(self._texts):
            self._fail("scores", f"has {len(scores)} entries, but there are {len(self._texts)} tokens")
        scores = scores[: len(self._texts)]
        if not all(map(isfinite, scores)):
            at = next(at for at, score in enumerate(scores) if not isfinite(score))
            self._fail("scores", f"is not finite for token {at}")
        encoder = SpmEncoder(
            self._texts,
            self._kinds,
            scores,
            unknown_id=self._token_id("unknown"),
            add_space_prefix=self._space_prefix(),
            strip_after=self._strip_after(),
        )
        return encoder, True

    def _strip_after(self) -> list[int]:
        # Phi-3's turn marks swallow the white space behind them ("rstrip" in its tokenizer.json); GGUF has no
        # key for that.
        if self._meta.get("general.architecture") != "phi3":
            return []
        control = positions(self._kinds, TokenKind.CONTROL)
        return [id for id in control if self._texts[id] not in ("<unk>", "<s>", "<|endoftext|>")]
