"""$ref, $id, $anchor and $dynamicRef inside one document. Nothing is ever fetched."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from fourfold.grammar.schema.walk import children, is_schema, resolve_pointer

BASE = "schema:///root"
"""The address of a document that names none."""


class References:
    """The addresses that the subschemas of a document go by."""

    def __init__(self, root: Any) -> None:
        self._documents: dict[str, Any] = {}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._bases: dict[int, str] = {}
        self._register(root)

    def _register(self, root: Any) -> None:
        work: list[tuple[Any, str]] = [(root, BASE)]
        self._documents[BASE] = root
        while work:
            schema, base = work.pop()
            if isinstance(schema, dict):
                id = schema.get("$id", schema.get("id"))
                if isinstance(id, str) and not (id.startswith("#") or "$ref" in schema):
                    base = urldefrag(urljoin(base, id)).url
                    self._documents[base] = schema
                elif isinstance(id, str) and id.startswith("#"):
                    self._anchors[base, id[1:]] = schema
                for name in ("$anchor", "$dynamicAnchor"):
                    if isinstance(schema.get(name), str):
                        self._anchors[base, schema[name]] = schema
                self._bases[id_of(schema)] = base
            work.extend((child, base) for _, child in children(schema))

    def target(self, holder: dict[str, Any], ref: str) -> Any:
        """The schema that `ref`, written in `holder`, names.

        Raises KeyError if that is nothing in this document.
        """
        base = self._bases.get(id_of(holder), BASE)
        if ref.startswith("#"):
            url, fragment = base, ref[1:]
        else:
            url, fragment = urldefrag(urljoin(base, ref) if ref else base)
        document = self._documents.get(url)
        if document is None:
            raise KeyError(ref)
        fragment = unquote(fragment)
        if not fragment:
            return document
        if fragment.startswith("/"):
            found = resolve_pointer(document, fragment)
        else:
            found = self._anchors[url, fragment]
        if not is_schema(found):
            raise KeyError(ref)
        return found


def id_of(schema: object) -> int:
    """Identity of a part of a document that is alive."""
    return id(schema)
