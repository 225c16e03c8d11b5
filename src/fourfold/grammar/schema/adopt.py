"""Subschemas that only a reference makes schemas: `components/schemas` of OpenAPI, `defs`, and the like."""

from __future__ import annotations

from typing import Any

from fourfold.grammar.schema.walk import children, is_schema, map_children, resolve_pointer


def adopt(schema: Any) -> Any:
    """The same schema with what stands under unknown keywords and is referred to moved to $defs.

    References that name nothing are left for the check to refuse.
    """
    moved = _referred_to(schema)
    if not moved:
        return schema
    names = {ref: f"adopted-{index}" for index, ref in enumerate(moved)}

    def copy(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        result = map_children(node, lambda _, child: copy(child))
        if node.get("$ref") in names:
            result["$ref"] = f"#/$defs/{names[node['$ref']]}"
        return result

    result = copy(schema)
    result["$defs"] = {**result.get("$defs", {}), **{names[ref]: copy(node) for ref, node in moved.items()}}
    return result


def _referred_to(schema: Any) -> dict[str, Any]:
    """Targets of references within the document that no keyword for schemas leads to, by reference."""
    seen: set[int] = set()
    pending: list[Any] = [schema]
    refs: list[str] = []
    moved: dict[str, Any] = {}
    while pending or refs:
        while pending:
            node = pending.pop()
            seen.add(id(node))
            if isinstance(node, dict):
                if node is not schema and isinstance(node.get("$id", node.get("id")), str):
                    return {}  # its references may begin at itself
                if isinstance(ref := node.get("$ref"), str) and ref.startswith("#/"):
                    refs.append(ref)
                pending += [child for _, child in children(node) if id(child) not in seen]
        if not refs:
            break
        ref = refs.pop()
        try:
            target = resolve_pointer(schema, ref[1:])
        except KeyError:
            continue
        if isinstance(target, dict) and is_schema(target) and id(target) not in seen:
            moved[ref] = target
            pending.append(target)
    return moved
