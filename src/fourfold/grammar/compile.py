"""Constraints compiled, once per content and tenant, into matchers that sequences get copies of."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from fourfold.errors import InvalidRequestError
from fourfold.grammar.rehearse import rehearse
from fourfold.types import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    from fourfold.grammar.guide import Guide

MAX_CACHED = 128
"""Compiled constraints kept."""
MAX_CACHED_BYTES = 32 << 20
"""Of their grammars' texts."""

_PLAIN = r'[^"\\\x00-\x1F\x7F]'
"""What stands for itself in a JSON string."""
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_PLAIN}{{1,{n}}}" for n in (1, 2, 3, 4, 6, 8, 10, 13, 17, 30)),
    _PLAIN + "+",
]
"""Parts of the vocabulary that a mask takes or leaves as a whole. A string that may still have n characters
takes all slices up to n at once; what is longer is looked at token by token. llguidance's own slices begin at
10, and masks of short strings took ten times as long."""


class TokenSource(Protocol):
    """What is needed of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, id: int, /) -> bytes: ...

    def encode(self, text: str, add_special_tokens: bool = ..., parse_special: bool = ...) -> list[int]: ...


def parser_limits() -> LLParserLimits:
    """What compiling (about 20 ms) and one mask (about 10 ms) may cost at the very most."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=2_000_000, step_lexer_fuel=200_000, max_lexer_states=100_000, verbose_errors=False
    )


class _Vocabulary:
    """The tokenizer as llguidance wants it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, source: TokenSource) -> None:
        self._source = source
        self.special_token_ids = sorted(source.special_ids)
        self.eos_token_id = source.eos_ids[0]
        special = source.special_ids
        self.tokens = [b"" if id in special else _bytes_of(source, id) for id in range(source.vocab_size)]
        for id in special:
            self.tokens[id] = b"<|%d|>" % id

    def __call__(self, text: str | bytes) -> list[int]:
        text = text.decode() if isinstance(text, bytes) else text
        return self._source.encode(text, add_special_tokens=False, parse_special=False)


def _bytes_of(source: TokenSource, id: int) -> bytes:
    try:
        return source.token_bytes(id)
    except InvalidRequestError:
        return b""  # an id without a token


class Compiler:
    """Threads may share one. The tokenizer is loaded with the first constraint: most never need it."""

    def __init__(self, load: Callable[[], TokenSource], vocab_size: int) -> None:
        """vocab_size: rows of the logits."""
        self._load = load
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._loading = threading.Lock()  # held for seconds; `cached` must not wait for that
        self._tokenizer: LLTokenizer | None = None
        self._tokens: Sequence[bytes] = ()
        self._eos: tuple[int, ...] = ()
        self._cache: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._cached_bytes = 0

    def cached(self, constraint: Constraint, tenant: str) -> Guide | None:
        """A guide if that constraint was compiled before for that tenant."""
        key = (tenant, constraint.grammar)
        with self._lock:
            matcher = self._cache.get(key)
            if matcher is not None:
                self._cache.move_to_end(key)
        return None if matcher is None else self._guide(matcher, constraint)

    def compile(self, constraint: Constraint, tenant: str) -> Guide:
        """Takes milliseconds, mostly without the GIL. Raises InvalidRequestError."""
        from llguidance import LLMatcher

        found = self.cached(constraint, tenant)
        if found is not None:
            return found
        matcher = LLMatcher(self._ready_tokenizer(), constraint.grammar, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise InvalidRequestError(
                f"{constraint.param}: the grammar cannot be compiled: {matcher.get_error()[:2000]}",
                constraint.param,
                "invalid_constraint",
            )
        rehearse(self._started(matcher, constraint), self._eos)
        self._keep((tenant, constraint.grammar), matcher)
        return self._guide(matcher, constraint)

    def warm(self) -> None:
        """Loads the tokenizer now. Raises what `compile` would."""
        self._ready_tokenizer()

    def _started(self, matcher: LLMatcher, constraint: Constraint) -> LLMatcher:
        """A copy after the text that the grammar begins with. Raises InvalidRequestError: a grammar can be
        well-formed and have no text at all ({"$ref": "#"}), or need too much for its first mask or for that
        text."""
        first = matcher.deep_copy()
        mask = first.compute_bitmask()
        first.consume_tokens(first.compute_ff_tokens())
        if first.is_error() or not any(mask):
            reason = first.get_error().partition("\n")[0][:300] or "no token can begin it"
            raise InvalidRequestError(
                f"{constraint.param}: no answer can satisfy the constraint: {reason}",
                constraint.param,
                "invalid_constraint",
            )
        return first

    def _guide(self, matcher: LLMatcher, constraint: Constraint) -> Guide:
        # Imported with the first constraint: an engine's start need not wait for it.
        from fourfold.grammar.guide import Guide

        return Guide(matcher.deep_copy(), self._tokens, self._vocab_size, constraint)

    def _keep(self, key: tuple[str, str], matcher: LLMatcher) -> None:
        with self._lock:
            if key not in self._cache:
                self._cached_bytes += len(key[1])
            self._cache[key] = matcher
            while len(self._cache) > MAX_CACHED or (
                self._cached_bytes > MAX_CACHED_BYTES and len(self._cache) > 1
            ):
                (_, grammar), _ = self._cache.popitem(last=False)
                self._cached_bytes -= len(grammar)

    def _ready_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._loading:
            if self._tokenizer is None:
                source = self._load()
                if not source.eos_ids:
                    raise InvalidRequestError(
                        "this model's tokenizer names no token that ends an answer; none can be constrained"
                    )
                vocabulary = _Vocabulary(source)
                self._tokenizer = LLTokenizer(
                    vocabulary,  # type: ignore[arg-type]  # it is used by its attributes
                    n_vocab=self._vocab_size,
                    eos_token=list(source.eos_ids),
                    slices=_SLICES,
                )
                self._tokens, self._eos = vocabulary.tokens, source.eos_ids
            return self._tokenizer
