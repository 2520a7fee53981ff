"""Cost limits of a case, so that a typo cannot take all memory or hours of time."""

from __future__ import annotations

import dataclasses
import json

import pytest

from zero_sim.errors import ScenarioError
from zero_sim.scenario import DataSpec, ModelSpec, NanSpec, RunSpec, Scenario, SystemSpec, WorldSpec
from zero_sim.scenario.costs import WORK_MAX, WORLD_ELEMS_MAX, check_costs
from zero_sim.scenario.fields import values_at
from zero_sim.scenario.load import parse_cases
from zero_sim.scenario.rules import BOUNDS, LISTS, check_scenario
from zero_sim.scenario.spec import LossScaleSpec, OptimizerSpec, PairSpec, ReloadSpec

MLP = Scenario(schema=1, model=ModelSpec(name="mlp"))
FULL = dataclasses.replace(
    MLP,
    data=DataSpec(nan=NanSpec(step=0, rank=0)),
    reload=ReloadSpec(step=1),
    pair=PairSpec(),
    optimizer=OptimizerSpec(loss_scale=LossScaleSpec()),
    run=RunSpec(own_micro_batches=(1,)),
)


def with_value(record, path, value):
    """Return the record with another value of a field."""
    name, _, rest = path.partition(".")
    if rest:
        value = with_value(getattr(record, name), rest, value)
    elif isinstance(getattr(record, name), tuple):
        value = tuple(value for _ in getattr(record, name))
    return dataclasses.replace(record, **{name: value})


def paths_of(**parts):
    """Return the paths of all problems."""
    return [problem.path for problem in check_scenario(dataclasses.replace(MLP, **parts))]


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: bound.path)
def test_every_number_has_a_minimum_and_a_maximum(bound):
    """A value beyond either is refused with the message of its bound."""
    kind = float if isinstance(getattr(bound, "most", None), float) else int
    beyond = (bound.least - 1, bound.most * 2 if kind is float else bound.most + 1)
    for value in beyond:
        scenario = with_value(FULL, bound.path, value)
        found = [
            problem for problem in check_scenario(scenario) if bound.in_words() in str(problem)
        ]
        assert {problem.path for problem in found} == {at for at, _ in values_at(FULL, bound.path)}


@pytest.mark.parametrize("path", LISTS)
def test_every_list_has_a_maximum(path):
    most = LISTS[path]
    raw: dict = {"schema": 1, "model": {"name": "params", "shapes": [[1]]}}
    table, _, name = path.rpartition(".")
    entry = {
        "model.shapes": [1],
        "model.one_rank": {"param": "p0", "rank": 0},
        "model.freeze": {"param": "p0", "start": 0, "stop": 1},
        "model.skip": {"param": "p0", "start": 0, "stop": 1},
        "optimizer.groups": {"match": "x"},
        "system.options": {"name": "x", "value": "y"},
        "faults": {"kind": "drop", "rank": 0},
        "run.own_micro_batches": 1,
    }.get(path, "x")
    (raw.setdefault(table, {}) if table else raw)[name] = [entry] * (most + 1)
    text = "\n".join(f"{key} = {inline(value)}" for key, value in raw.items())
    with pytest.raises(ScenarioError) as caught:
        parse_cases(text, source="case.toml", stem="case")
    assert f"{path}: expected at most {most:,} entries, got {most + 1:,}." in str(caught.value)


def inline(value):
    """Format a value as TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {inline(item)}" for key, item in value.items()) + "}"
    return f"[{', '.join(map(inline, value))}]" if isinstance(value, list) else json.dumps(value)


@pytest.mark.parametrize(
    "parts",
    [
        {"model": ModelSpec(name="mlp", hidden=8192, blocks=3)},
        {"model": ModelSpec(name="moe", hidden=4096, experts=100)},
        {"model": ModelSpec(name="ternary", hidden=8192)},
        {"model": ModelSpec(name="params", shapes=((2**29 + 1,),))},
        {"model": ModelSpec(name="mlp", hidden=512), "world": WorldSpec(size=4096)},
        {"data": DataSpec(rows=2**20), "world": WorldSpec(size=64)},
        {"system": SystemSpec(align_elems=2**16, align_bytes=2**16 - 1)},
    ],
)
def test_memory_is_counted_over_all_ranks(parts):
    assert "world.size" in paths_of(**parts)


@pytest.mark.parametrize(
    "parts",
    [
        {"run": RunSpec(steps=10**6)},
        {"run": RunSpec(steps=10, micro_batches=10**5)},
        {"run": RunSpec(steps=1000), "world": WorldSpec(size=1024)},
        {"model": ModelSpec(name="params", shapes=((1,),) * 9_999), "run": RunSpec(steps=1000)},
        {"data": DataSpec(rows=2**16), "run": RunSpec(steps=2000)},
    ],
)
def test_time_is_counted_in_elements(parts):
    assert paths_of(**parts) == ["run.steps"]


def test_larger_world_after_a_reload_counts():
    model = ModelSpec(name="params", shapes=((2**20,),))
    small = dataclasses.replace(MLP, model=model)
    assert list(check_costs(small)) == []
    grown = dataclasses.replace(small, reload=ReloadSpec(step=1, world_size=2048))
    assert [problem.path for problem in check_costs(grown)] == ["world.size"]


def test_message_has_both_numbers():
    (problem,) = check_costs(dataclasses.replace(MLP, run=RunSpec(steps=10**6)))
    assert f"{WORK_MAX:,} elements in all steps" in problem.message
    (problem,) = check_costs(
        dataclasses.replace(MLP, model=ModelSpec(name="params", shapes=((2**30,),)))
    )
    assert f"at most {WORLD_ELEMS_MAX:,} elements on all ranks" in problem.message


@pytest.mark.parametrize(
    "parts",
    [
        {"world": WorldSpec(size=4096)},
        {"model": ModelSpec(name="params", shapes=((1,),) * 1_000), "world": WorldSpec(size=64)},
        {"model": ModelSpec(name="mlp", hidden=1024, blocks=4)},
        {"run": RunSpec(steps=1000), "world": WorldSpec(size=64)},
        {"system": SystemSpec(align_bytes=4096), "world": WorldSpec(size=64)},
    ],
)
def test_ordinary_cases_are_within_limits(parts):
    assert paths_of(**parts) == []


def test_file_is_limited_by_the_sum_of_its_cases():
    shapes = "[" + "[1]," * 1_000 + "]"
    text = f'schema = 1\n[model]\nname = "params"\nshapes = {shapes}\n[matrix]\n"run.seed" = '
    with pytest.raises(ScenarioError, match=r"matrix: expected at most 500,000 values in all cas"):
        parse_cases(text + f"{list(range(1000))}\n", source="case.toml", stem="case")


def test_matrix_has_at_most_one_key_per_field():
    keys = "".join(f"k{i} = [1]\n" for i in range(3_000))
    text = f'schema = 1\n[model]\nname = "mlp"\n[matrix]\n{keys}'
    with pytest.raises(ScenarioError, match=r"matrix: expected at most \d+ keys, one per field"):
        parse_cases(text, source="case.toml", stem="case")


@pytest.mark.parametrize("value", ['"x"', "-1"])
def test_only_the_first_of_many_problems_are_listed(value):
    shapes = f"[{f'[{value}],' * 5_000}]"
    text = f'schema = 1\n[model]\nname = "params"\nshapes = {shapes}\n'
    with pytest.raises(ScenarioError) as caught:
        parse_cases(text, source="case.toml", stem="case")
    assert len(caught.value.problems) == 101
    assert "4,900 more" in str(caught.value.problems[-1])
