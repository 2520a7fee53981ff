"""Strings of a scenario: limited length, no invisible characters."""

import dataclasses
import json

import pytest

from zero_sim.errors import ScenarioError
from zero_sim.scenario import ModelSpec, OptimizerSpec, Scenario
from zero_sim.scenario.load import load_cases, parse_cases
from zero_sim.scenario.rules import check_scenario
from zero_sim.scenario.spec import ParamGroupSpec, TopologySpec
from zero_sim.scenario.texts import DESCRIPTION_CHARS_MAX, NAME_CHARS_MAX

MLP = Scenario(schema=1, model=ModelSpec(name="mlp"))
UNSEEN = ["\n", "\r", "\t", "\0", "\x07", "\x1b", "\x7f", "\x9b", "\u202e", "\u200b", "\u2028"]


def paths_of(**changed):
    """Return the paths of all problems."""
    return [problem.path for problem in check_scenario(dataclasses.replace(MLP, **changed))]


@pytest.mark.parametrize("char", UNSEEN)
def test_invisible_characters_in_a_name_are_refused(char):
    assert paths_of(name=f"a{char}PASS") == ["name"]


def test_name_may_be_in_any_language():
    assert paths_of(name="größe=3 ☃ 日本語") == []


def test_description_may_have_lines():
    assert paths_of(description="one\n\ttwo") == []
    assert paths_of(description="\x1b]0;title\x07") == ["description"]


def test_lengths_are_limited():
    assert paths_of(name="x" * NAME_CHARS_MAX, description="x" * DESCRIPTION_CHARS_MAX) == []
    assert paths_of(name="x" * (NAME_CHARS_MAX + 1)) == ["name"]
    assert paths_of(description="x" * (DESCRIPTION_CHARS_MAX + 1)) == ["description"]


def test_every_string_is_checked():
    optimizer = OptimizerSpec(
        groups=(ParamGroupSpec(match="a", lr=1.0), ParamGroupSpec(match="\x1b", lr=1))
    )
    topology = TopologySpec(shared=("\n",))
    found = paths_of(optimizer=optimizer, topology=topology)
    assert {"topology.shared[0]", "optimizer.groups[1].match"} <= set(found)


def test_message_shows_character_and_position():
    (problem,) = check_scenario(dataclasses.replace(MLP, name="ab\x1b[31m"))
    assert problem.message == (
        r"expected a string without control characters, got '\x1b' at character 2."
    )


def test_id_with_matrix_values_is_limited(tmp_path):
    name = json.dumps("x" * (NAME_CHARS_MAX - 2))
    text = f'schema = 1\nname = {name}\n[model]\nname = "mlp"\n[matrix]\n"world.size" = [1, 2]\n'
    with pytest.raises(ScenarioError, match="expected a case id of at most 1,000 characters"):
        parse_cases(text, source="case.toml", stem="case")


def test_file_name_follows_the_rules_of_names(tmp_path):
    path = tmp_path / "x\nPASS  all.toml"
    path.write_text('schema = 1\n[model]\nname = "mlp"\n')
    with pytest.raises(ScenarioError) as caught:
        load_cases(path)
    head, line = str(caught.value).splitlines()
    assert head.endswith(r"x\nPASS  all.toml: 1 problem")
    assert line.endswith("Rename the file, or write name = ... in it.")
