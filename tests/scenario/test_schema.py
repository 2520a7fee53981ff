"""JSON Schema that `zero-sim schema` prints."""

from __future__ import annotations

import json

from zero_sim.scenario.fields import field_paths
from zero_sim.scenario.schema import DIALECT, scenario_schema

SCHEMA = scenario_schema()


def node(path):
    """Return the schema of one field."""
    here: dict = SCHEMA
    for name in path.split("."):
        here = here["properties"][name]
        if "$ref" in here:
            here = SCHEMA["$defs"][here["$ref"].rpartition("/")[2]]
    return here


def objects(value):
    """Yield all nested objects."""
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from objects(item)
    elif isinstance(value, list):
        for item in value:
            yield from objects(item)


def test_schema_is_json_and_names_its_dialect():
    assert json.loads(json.dumps(SCHEMA))["$schema"] == DIALECT


def test_every_field_is_described():
    assert [path for path in field_paths() if not node(path)["description"]] == []


def test_unknown_fields_are_refused_in_every_table():
    """Editors then underline them as loading would refuse them."""
    tables = [node for node in objects(SCHEMA) if "properties" in node and "title" in node]
    assert len(tables) >= 9
    assert all(table["additionalProperties"] is False for table in tables)


def test_null_is_never_accepted():
    """TOML has no null."""
    assert '"null"' not in json.dumps(SCHEMA)


def test_ranges_equal_those_of_the_rules():
    assert (node("world.size")["minimum"], node("world.size")["maximum"]) == (1, 4096)
    assert node("optimizer.lr")["exclusiveMinimum"] == 0
    assert [item["exclusiveMaximum"] for item in node("optimizer.betas")["prefixItems"]] == [1, 1]


def test_every_number_and_list_has_limits():
    """Except indices, steps and ranks that other fields limit."""
    bound_by_others = {"data.nan.step", "data.nan.rank", "reload.step", "schema"}
    bound_by_others |= {"data.nan.micro_batch", "optimizer.loss_scale.initial"}
    for path in set(field_paths()) - bound_by_others:
        field = node(path)
        if field.get("type") in ("integer", "number") and "enum" not in field:
            assert "maximum" in field or "exclusiveMaximum" in field, path
            assert "minimum" in field or "exclusiveMinimum" in field, path
        if field.get("type") == "array":
            assert "maxItems" in field, path
        if field.get("type") == "string" and "enum" not in field:
            assert field["maxLength"] in (1_000, 10_000), path


def test_entries_of_lists_have_limits():
    fault = SCHEMA["$defs"]["FaultSpec"]["properties"]
    assert (fault["call"]["minimum"], fault["call"]["maximum"]) == (0, 10**9)
    assert fault["bit"]["maximum"] == 63
    assert SCHEMA["$defs"]["ParamGroupSpec"]["properties"]["lr"]["minimum"] == 0


def test_matrix_lists_every_path_that_may_vary():
    """For completion in editors; each value is a list of the field's values."""
    matrix = SCHEMA["properties"]["matrix"]
    assert set(matrix["properties"]) == set(field_paths()) - {"schema", "name"}
    sizes = matrix["properties"]["world.size"]
    assert (sizes["type"], sizes["minItems"], sizes["items"]["type"]) == ("array", 1, "integer")
