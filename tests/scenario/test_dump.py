"""A scenario written to a file reads back equal."""

import dataclasses
import json
import tomllib
from pathlib import Path

import pytest

from zero_sim.scenario.discover import discover
from zero_sim.scenario.dump import to_chosen_toml, to_data, to_toml
from zero_sim.scenario.load import parse_cases
from zero_sim.scenario.spec import FreezeSpec, ModelSpec, OptimizerSpec, Scenario

SCENARIOS = Path(__file__).parents[2] / "scenarios"


def test_every_shipped_case_reads_back_equal():
    cases = discover([SCENARIOS]).cases[::7]
    assert len(cases) > 20
    for case in cases:
        (read,) = parse_cases(to_toml(case.scenario), source="case.toml", stem="case")
        assert read == case.scenario


def test_chosen_fields_alone_read_back_equal():
    for case in discover([SCENARIOS]).cases[::7]:
        text = to_chosen_toml(case.scenario)
        (read,) = parse_cases(text, source="case.toml", stem="case")
        assert read == case.scenario
        assert len(text) < len(to_toml(case.scenario)) / 2


@pytest.mark.parametrize("text", ['a "quoted" name', "naïve ☃ 🙂", "a\\b", "two\nlines\tand a tab"])
def test_awkward_strings_read_back_equal(text):
    scenario = Scenario(schema=1, description=text, model=ModelSpec(name="mlp"))
    (read,) = parse_cases(to_toml(scenario), source="case.toml", stem="case")
    assert read.description == text


@pytest.mark.parametrize("text", ["\x7f", "\x9b31m", "\u202eturned", "\u2028", "\U000e0001", "\0"])
def test_invisible_characters_are_escaped(text):
    """Reports print this text; a parser reads the same string."""
    scenario = Scenario(schema=1, description=text, model=ModelSpec(name="mlp"))
    written = to_toml(scenario)
    assert written.replace("\n", "").isprintable()
    assert tomllib.loads(written)["description"] == text


def test_arrays_of_tables_and_shapes_read_back_equal():
    model = ModelSpec(
        name="params", shapes=((5,), (), (2, 3)), freeze=(FreezeSpec(param="p0", start=0, stop=1),)
    )
    scenario = Scenario(schema=1, name="x", model=model, optimizer=OptimizerSpec(eps=1e-30))
    text = to_toml(scenario)
    assert 'freeze = [{ param = "p0", start = 0, stop = 1 }]' in text
    (read,) = parse_cases(text, source="case.toml", stem="case")
    assert read == scenario


def test_data_is_complete_and_valid_json():
    """Defaults are included, so that later defaults do not change the case."""
    data = to_data(Scenario(schema=1, model=ModelSpec(name="mlp")))
    assert json.loads(json.dumps(data)) == data
    world = data["world"]
    assert isinstance(world, dict)
    spec = Scenario(schema=1, model=ModelSpec(name="mlp")).world
    assert set(world) == {field.name for field in dataclasses.fields(spec)}
