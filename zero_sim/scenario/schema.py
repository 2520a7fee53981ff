"""JSON Schema for scenario files, for editors and other tools."""

from __future__ import annotations

import copy

from zero_sim.scenario.decode import adapter
from zero_sim.scenario.kinds import OWN_MODEL
from zero_sim.scenario.matrix import CASES_MAX
from zero_sim.scenario.rules import (
    BOUNDS,
    DIMS_MAX,
    ITEM_BOUNDS,
    LISTS,
    PARAM_ELEMS_MAX,
    Bound,
)
from zero_sim.scenario.texts import DESCRIPTION_CHARS_MAX, NAME_CHARS_MAX

DIALECT = "https://json-schema.org/draft/2020-12/schema"

Node = dict[str, object]


def scenario_schema() -> Node:
    """Return the JSON Schema for scenario files, with descriptions, ranges and the matrix.

    Returns:
        A JSON Schema object, without the conditions over several fields that loading checks.
    """
    schema: Node = copy.deepcopy(adapter().json_schema())
    _drop_null(schema)
    for bound in (*BOUNDS, *ITEM_BOUNDS):
        _add_bound(_field(schema, bound.path), bound)
    # Ranges and limits come from `rules`, so that the schema never differs from loading.
    for path, most in LISTS.items():
        _field(schema, path)["maxItems"] = most
    _table(_field(schema, "model.shapes")["items"])["maxItems"] = DIMS_MAX
    _add_lengths(schema)
    _add_own_model(_field(schema, "model.name"))
    properties = _table(schema["properties"])
    properties["matrix"] = {
        "description": "Lists of values by field path. Their product gives the cases, at most "
        f"{CASES_MAX:,}.",
        "type": "object",
        "properties": _axes(schema),
        "additionalProperties": False,
    }
    _field(schema, "description")["maxLength"] = DESCRIPTION_CHARS_MAX
    shapes = _field(schema, "model.shapes")
    shapes["description"] = f"{shapes['description']} At most {PARAM_ELEMS_MAX:,} elements in all."
    return {"$schema": DIALECT, **schema, "title": "zero_sim scenario"}


def _table(node: object) -> Node:
    assert isinstance(node, dict)
    return node


def _resolve(schema: Node, node: Node) -> Node:
    ref = node.get("$ref")
    if not isinstance(ref, str):
        return node
    return _table(_table(schema["$defs"])[ref.rpartition("/")[2]])


def _field(schema: Node, path: str) -> Node:
    node = schema
    for name in path.split("."):
        # In a list, continue with its entries' schema.
        if "properties" not in node:
            node = _resolve(schema, _table(node["items"]))
        # A table is a reference into `$defs`.
        node = _resolve(schema, _table(_table(node["properties"])[name]))
    return node


def _add_lengths(node: object) -> None:
    """Limit the length of strings without choices, as `texts` does."""
    if isinstance(node, dict) and node.get("type") == "string" and "enum" not in node:
        node["maxLength"] = NAME_CHARS_MAX
    for item in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _add_lengths(item)


def _add_own_model(node: Node) -> None:
    options = node["anyOf"]
    assert isinstance(options, list)
    _table(options[1])["pattern"] = f"^{OWN_MODEL}$"


def _drop_null(node: object) -> None:
    """Remove null from optional fields, because TOML has no null."""
    if isinstance(node, list):
        for item in node:
            _drop_null(item)
    if not isinstance(node, dict):
        return
    options = node.get("anyOf")
    if isinstance(options, list):
        kept = [option for option in options if option != {"type": "null"}]
        # `anyOf` stays only for real unions, such as model names.
        if len(kept) == 1:
            del node["anyOf"]
            node.update(kept[0])
    # Nor can a default be null.
    if node.get("default", ...) is None:
        del node["default"]
    for item in node.values():
        _drop_null(item)


def _add_bound(node: Node, bound: Bound) -> None:
    # For a tuple such as `optimizer.betas`, each item has the range.
    items = node.get("prefixItems")
    targets = [_table(item) for item in items] if isinstance(items, list) else [node]
    for target in targets:
        target["exclusiveMinimum" if bound.open_least else "minimum"] = bound.least
        target["exclusiveMaximum" if bound.open_most else "maximum"] = bound.most


def _axes(schema: Node) -> Node:
    """Return a list-valued property for each field path, such as `world.size`."""
    axes: Node = {}

    def visit(record: Node, prefix: str) -> None:
        for name, raw in _table(record["properties"]).items():
            path, node = f"{prefix}{name}", _table(raw)
            # These two belong to the file, so they cannot vary; see `matrix`.
            if path in ("schema", "name"):
                continue
            inner = _resolve(schema, node)
            # A matrix may vary a whole table, or any of its fields.
            is_record = "properties" in inner
            item: Node = {"type": "object"} if is_record else dict(node)
            # A matrix entry has no default.
            item.pop("default", None)
            # A path such as `world.size` is a single quoted key.
            axes[path] = {
                "description": node.get("description", ""),
                "type": "array",
                "minItems": 1,
                "uniqueItems": True,
                "items": item,
            }
            if is_record:
                visit(inner, f"{path}.")

    visit(schema, "")
    return axes
