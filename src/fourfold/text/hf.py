"""Tokenizers from a Hugging Face directory: tokenizer.json and the files beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from fourfold.errors import LoadError
from fourfold.text.bpe import LibraryEncoder
from fourfold.text.tokenizer import Tokenizer, TokenizerSpec
from fourfold.text.vocabulary import Spelling, TokenKind, Vocabulary
from fourfold.weights.json_file import read_object

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
_EOS_ROLES = ("eos_token", "eot_token", "eom_token")


def load_hf_tokenizer(directory: Path) -> Tokenizer:
    """Raises LoadError naming the file and the key that is missing, damaged or unknown."""
    file = directory / "tokenizer.json"
    if not file.exists():
        fix = (
            "it has only the SentencePiece file tokenizer.model; convert it once with transformers: "
            f"AutoTokenizer.from_pretrained({str(directory)!r}).save_pretrained({str(directory)!r})"
            if (directory / "tokenizer.model").exists()
            else "copy it from the model's page"
        )
        raise LoadError(f"{directory}: has no tokenizer.json; {fix}")
    try:
        library = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise LoadError(f"{file}: is not a tokenizer of the tokenizers library: {error}") from error
    library.no_padding()
    library.no_truncation()

    config = _optional(directory / "tokenizer_config.json")
    special = _special_tokens(directory, config)
    ids: dict[str, int] = {}
    for role, text in special.items():
        id = library.token_to_id(text)
        if id is not None:
            ids[role] = id
    vocabulary, strip = _vocabulary(library, file)
    prefix, suffix = _surroundings(library, config, ids)
    spec = TokenizerSpec(
        bos_id=ids.get("bos_token"),
        eos_ids=_eos_ids(directory, ids),
        prefix_ids=prefix,
        suffix_ids=suffix,
        special_tokens={role: text for role, text in special.items() if role in _ROLES},
        chat_templates=_chat_templates(directory, config),
        strip_leading_space=strip,
    )
    return Tokenizer(vocabulary, LibraryEncoder(library), spec)


def _optional(file: Path) -> dict[str, Any]:
    return read_object(file) if file.exists() else {}


def _special_tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Texts by role; a token is written as a string or as an object with its content."""
    found: dict[str, str] = {}
    for name, values in (
        ("special_tokens_map.json", _optional(directory / "special_tokens_map.json")),
        ("tokenizer_config.json", config),
    ):
        for role in {*_ROLES, *_EOS_ROLES}:
            value = values.get(role)
            text = value.get("content") if isinstance(value, dict) else value
            if text is None:
                continue
            if not isinstance(text, str):
                raise LoadError(f"{directory / name}: {role} must be a string, but is {type(text).__name__}")
            found[role] = text
    return found


def _eos_ids(directory: Path, ids: Mapping[str, int]) -> tuple[int, ...]:
    found = {ids[role] for role in _EOS_ROLES if role in ids}
    for name in ("config.json", "generation_config.json"):
        values = _optional(directory / name)
        text_config = values.get("text_config")
        for holder in (values, text_config if isinstance(text_config, dict) else {}):
            value = holder.get("eos_token_id")
            for id in value if isinstance(value, list) else [value]:
                if id is None:
                    continue
                if isinstance(id, bool) or not isinstance(id, int) or id < 0:
                    raise LoadError(f"{directory / name}: eos_token_id must be token ids, but has {id!r}")
                found.add(id)
    return tuple(sorted(found))


def _surroundings(
    library: tokenizers.Tokenizer, config: Mapping[str, Any], ids: Mapping[str, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor puts before and after a text; tokenizer_config's flags win."""
    bare: list[int] = library.encode("a", add_special_tokens=False).ids
    full: list[int] = library.encode("a", add_special_tokens=True).ids
    starts = [at for at in range(len(full) - len(bare) + 1) if full[at : at + len(bare)] == bare]
    at = starts[0] if starts else 0
    ends = [list(full[:at]), list(full[at + len(bare) :])] if starts else [[], []]
    for end, flag, role in ((0, "add_bos_token", "bos_token"), (1, "add_eos_token", "eos_token")):
        wanted = config.get(flag)
        if isinstance(wanted, bool) and role in ids and wanted != (ids[role] in ends[end]):
            ends[end] = [ids[role]] if wanted else [id for id in ends[end] if id != ids[role]]
    return tuple(ends[0]), tuple(ends[1])


def _decoders(description: Any) -> Iterator[Mapping[str, Any]]:
    if description["type"] == "Sequence":
        for each in description["decoders"]:
            yield from _decoders(each)
    else:
        yield description


def _vocabulary(library: tokenizers.Tokenizer, file: Path) -> tuple[Vocabulary, bool]:
    """The vocabulary, and whether decoding strips a leading space."""
    decoder = library.decoder
    steps = list(_decoders(json.loads(decoder.__getstate__()))) if decoder is not None else []
    types = {step["type"] for step in steps}
    known = {"ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}
    if not types <= known:
        raise LoadError(
            f"{file}: the decoder has the steps {', '.join(sorted(types - known))}; known are "
            f"{', '.join(sorted(known))}"
        )
    spelling: Spelling = "plain"
    if "ByteLevel" in types:
        spelling = "byte-level"
    elif types & {"Metaspace", "Replace"}:
        spelling = "sentencepiece"
    strip = any(
        (step["type"] == "Strip" and step["content"] == " " and step["start"] > 0)
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )
    tokens: dict[str, int] = library.get_vocab(with_added_tokens=True)
    size = max(tokens.values(), default=-1) + 1
    if size > 2 * len(tokens) + 65536:
        raise LoadError(f"{file}: has {len(tokens)} tokens, but ids up to {size - 1}")
    texts: list[str | None] = [None] * size
    kinds = bytearray([TokenKind.NORMAL]) * size
    for text, id in tokens.items():
        texts[id] = text
    if "ByteFallback" in types:
        for byte in range(256):
            id = tokens.get(f"<0x{byte:02X}>", -1)
            if id >= 0:
                kinds[id] = TokenKind.BYTE
    for id, added in library.get_added_tokens_decoder().items():
        texts[id] = added.content
        kinds[id] = TokenKind.CONTROL if added.special else TokenKind.USER_DEFINED
    return Vocabulary(texts, bytes(kinds), spelling), strip


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. A file chat_template.jinja wins over tokenizer_config's entry."""
    templates: dict[str, str] = {}
    sources = [
        ("chat_template.json", _optional(directory / "chat_template.json")),
        ("tokenizer_config.json", config),
    ]
    for name, values in sources:
        value = values.get("chat_template")
        entries = value if isinstance(value, list) else [{"name": "default", "template": value}]
        for entry in entries if value is not None else ():
            if not isinstance(entry, dict) or not all(
                isinstance(entry.get(k), str) for k in ("name", "template")
            ):
                raise LoadError(
                    f"{directory / name}: chat_template must be a string or a list of named templates"
                )
            templates[entry["name"]] = entry["template"]
    for file in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _read_text(file)
    if (directory / "chat_template.jinja").exists():
        templates["default"] = _read_text(directory / "chat_template.jinja")
    return templates


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{file}: cannot be read as UTF-8 text: {error}") from error
