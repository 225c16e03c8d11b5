"""How byte-level BPE vocabularies cut text into words before merging, by the name a GGUF file gives.

The name is the value of tokenizer.ggml.pre; the patterns are those of the tokenizer.json of the models the
name stands for (Oniguruma syntax). Patterns are applied one after the other, each to the pieces the ones
before have left.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SLASH_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASH_TAIL}"
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}|{_SLASH_TAIL}"
)
_CJK = r"[一-龥ࠀ-一가-퟿]+"
# Letters that have case, as ranges of code points (Unicode's cased letters, a few newer ones missing).
_CASED_RANGES = """
    41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376-377 37b-37d 37f 386 388-38a 38c
    38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b
    1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4
    1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113
    2115 2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183-2184 2c00-2c7b
    2c7e-2ce4 2ceb-2cee 2cf2-2cf3 a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06
    fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df
    1e900-1e943
"""
_CASED = "[{}]+".format(
    "".join("-".join(chr(int(end, 16)) for end in each.split("-")) for each in _CASED_RANGES.split())
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


class PreTokenizer(msgspec.Struct, frozen=True):
    """patterns: see above.  add_bos: unless the file says otherwise.

    ignore_merges: a word that is a token is taken whole, even if the merges would not make it.
    """

    patterns: tuple[str, ...]
    add_bos: bool = False
    ignore_merges: bool = False


def _table() -> Iterator[tuple[str, PreTokenizer]]:
    gpt2 = PreTokenizer((_GPT2,))
    for name in (
        "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat",
        "a.x-4.0", "mellum", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de",
    ):  # fmt: skip
        yield name, gpt2
    digits = PreTokenizer((r"\p{N}", _GPT2))
    for name in ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"):
        yield name, digits
    llama3 = PreTokenizer((_LLAMA3,), add_bos=True, ignore_merges=True)
    for name in ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"):
        yield name, llama3
    for name in ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"):
        yield name, PreTokenizer((_LLAMA3,))
    qwen2 = PreTokenizer((_QWEN2,))
    for name in ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "grok-2"):
        yield name, qwen2
    for name in ("gpt-4o", "llama4", "minimax-m2"):
        yield name, PreTokenizer((_GPT4O,))
    for name in ("bloom", "poro-chat", "gpt3-finnish"):
        yield name, PreTokenizer((_BLOOM,))
    yield "viking", PreTokenizer((_BLOOM, r"\p{N}"))
    yield "tekken", PreTokenizer((_TEKKEN,), add_bos=True, ignore_merges=True)
    yield "default", PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
    yield "falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))
    yield "deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"))
    yield (
        "deepseek-llm",
        PreTokenizer(
            (r"[\r\n]", rf"\s?{_CASED}", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK, r"\p{N}+")
        ),
    )
    deepseek3 = PreTokenizer(
        (
            r"\p{N}{1,3}",
            r"[一-龥぀-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    )
    yield "deepseek-v3", deepseek3
    yield "hunyuan-dense", deepseek3
    yield (
        "chameleon",
        PreTokenizer(
            (
                "<sentinel:[0-9]+>",
                "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            add_bos=True,
        ),
    )
    bailing = PreTokenizer(
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
            r"|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    )
    for name in ("bailingmoe", "bailingmoe2", "llada-moe"):
        yield name, bailing
    yield (
        "seed-coder",
        PreTokenizer(
            (rf"{_CONTRACTION}|{_LEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",)
        ),
    )


PRE_TOKENIZERS: dict[str, PreTokenizer] = dict(_table())
