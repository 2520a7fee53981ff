"""Options of a target: declared, drawn, recorded, refused, shrunk."""

import pytest
from hypothesis import strategies as st

from tests.judge.ruled import Target
from zero_sim import run_case
from zero_sim.errors import ProtocolError, UsageError
from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.scenario.dump import to_chosen_toml
from zero_sim.scenario.load import parse_cases
from zero_sim.scenario.spec import ModelSpec, RunSpec, Scenario, SystemSpec, WorldSpec
from zero_sim.shrink import Limits, shrink_finding
from zero_sim.targets import Option, chosen_options, options_of, refusals, with_options
from zero_sim.targets.options import check_given

CASE = Scenario(
    schema=1,
    name="opted",
    model=ModelSpec(name="params", shapes=((3,), (2, 2))),
    world=WorldSpec(size=2),
    system=SystemSpec(stage=0),
    run=RunSpec(steps=1),
)
OPTIONS = {
    "wrong by": Option(default=1.0, values=(2.0, 3.0)),
    "colour": Option(default="red", values=st.sampled_from(["red", "blue"])),
    "fast": Option(default=False, values=(True,)),
}


class Opted(Target):
    """A target whose option multiplies the divisor by a wrong factor."""

    options = OPTIONS

    def build(self, module, *, scenario, group):
        chosen = chosen_options(self, scenario)
        assert type(chosen["fast"]) is bool
        self.does = {"by": group.size() * chosen["wrong by"]}
        return super().build(module, scenario=scenario, group=group)


def test_omitted_options_have_their_defaults():
    case = with_options(CASE, {"fast": "true"})
    assert chosen_options(Opted(), case) == {"wrong by": 1.0, "colour": "red", "fast": True}


def test_options_are_recorded_in_the_case():
    case = with_options(CASE, {"wrong by": "2.0", "colour": "blue"})
    text = to_chosen_toml(case)
    assert 'name = "wrong by"' in text
    assert parse_cases(text, source="here", stem="opted")[0].system.options == case.system.options


def test_unknown_options_and_values_are_refused():
    refused = [
        ({"colou": "red"}, "Try 'colour'"),
        ({"fast": "yes"}, "expected true or false, got 'yes'"),
        ({"wrong by": "much"}, "expected a number, got 'much'"),
    ]
    for said, words in refused:
        (problem,) = refusals(Opted(), with_options(CASE, said))
        assert words in f"{problem.message} {problem.suggestion}"
    assert [p.path for p in refusals(Target(), with_options(CASE, {"fast": "true"}))] == [
        "system.options[0].name"
    ]


def test_option_may_fit_some_cases_only():
    fits = Option(default=0, values=(1,), fits=lambda case: "two ranks" * (case.world.size == 2))
    target = Opted()
    target.options = {"n": fits}
    assert refusals(target, with_options(CASE, {"n": "0"})) == ()
    assert "two ranks" in refusals(target, with_options(CASE, {"n": "1"}))[0].message


def test_drawn_cases_have_options():
    drawn = [
        case for case, _ in zip(draws(drawn_cases(Opted()), seed="7"), range(60), strict=False)
    ]
    said = {(each.name, each.value) for case in drawn for each in case.system.options}
    assert {"wrong by", "colour", "fast"} == {name for name, _ in said}
    assert ("colour", "red") not in said, "what is by default is left out"
    assert any(not case.system.options for case in drawn)


def test_value_of_another_type_is_an_error_of_the_declaration():
    target = Opted()
    target.options = {"n": Option(default=0, values=("one",))}
    with pytest.raises(ProtocolError, match="draw values like its default, 0, got 'one'"):
        for _ in zip(draws(drawn_cases(target), seed="7"), range(40), strict=False):
            pass
    with pytest.raises(UsageError, match="expected the default of an option"):
        Option(default=None)
    target.options = ["n"]
    with pytest.raises(ProtocolError, match="'options' of target 'ruled'"):
        options_of(target)


def test_irrelevant_options_are_shrunk_away():
    target = Opted()
    case = with_options(CASE, {"wrong by": "3.0", "colour": "blue", "fast": "true"})
    judge = lambda other: run_case(other, target=target)  # noqa: E731
    result = judge(case)
    assert result.verdict == "fail"
    reduced, _ = shrink_finding(
        case,
        result,
        judge=judge,
        limits=Limits(seconds=60.0),
        may_run=lambda other: not refusals(target, other),
    )
    assert [each.name for each in reduced.scenario.system.options] == ["wrong by"]


def test_option_values_are_checked_against_declarations():
    check_given(Opted(), {"fast": "true"})
    with pytest.raises(UsageError, match="expected --option to name an option of target 'ruled'"):
        check_given(Opted(), {"slow": "true"})
    with pytest.raises(UsageError, match="--option fast: expected true or false"):
        check_given(Opted(), {"fast": "1"})
