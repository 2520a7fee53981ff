"""`zero-sim rules`: exit status and output."""

import itertools
import json

import pytest
from click.testing import CliRunner

from zero_sim.cli.rules import rules
from zero_sim.rules import found as found_rules
from zero_sim.rules.report import FoundRules


@pytest.fixture
def found(monkeypatch):
    """Rules found for any target."""
    found = FoundRules(target="mine")
    monkeypatch.setattr(found_rules, "find_rules", lambda target: found)
    return found


def test_no_contradiction_has_exit_status_0(found):
    ended = CliRunner().invoke(rules, ["--target", "zero_sim"])
    assert ended.exit_code == 0
    assert "WRONG" not in ended.stdout


@pytest.mark.parametrize("said", ["contradicted", "alarms"])
def test_contradiction_or_alarm_has_exit_status_1(found, said):
    getattr(found, said).append("something")
    ended = CliRunner().invoke(rules, ["--target", "zero_sim", "--json"])
    assert ended.exit_code == 1
    assert json.loads(ended.stdout)[said] == ["something"]


def test_alarm_is_printed_first_and_last(found):
    found.alarms.append("3 ranks differ")
    lines = CliRunner().invoke(rules, ["--target", "zero_sim"]).stdout.splitlines()
    assert lines[0] == "# DO NOT DECLARE THIS: something is wrong, see the end"
    assert lines[-2:] == ["WRONG, so declare nothing of the above:", "  3 ranks differ"]


@pytest.mark.parametrize(
    ("numerics", "field", "factor", "count"),
    [
        ({"divide": "none", "sync": "last"}, "divide", "N x the mean", "ranks"),
        (
            {"sync": "last", "divide": "none", "divide_by": "ranks"},
            "divide",
            "N x the mean",
            "ranks",
        ),
        ({"divide_by": "ranks"}, "divide_by", "M x their mean", "micro-batches, too"),
    ],
)
def test_missing_division_is_explained_at_its_rule(found, numerics, field, factor, count):
    found.numerics |= numerics
    shown = CliRunner().invoke(rules, ["--target", "zero_sim"])
    told = CliRunner().invoke(rules, ["--target", "zero_sim", "--json"])
    assert (shown.exit_code, told.exit_code) == (0, 0)
    ((of, why),) = json.loads(told.stdout)["undivided"].items()
    assert of == field
    assert f" is not divided, so the gradient is {factor}, with " in why
    assert f"If this is intended, declare it; otherwise divide by the number of {count}." in why
    lines = shown.stdout.splitlines()
    place = lines.index(f"    {field}={numerics[field]!r},")
    above = list(itertools.takewhile(lambda line: line.startswith("    # "), lines[:place][::-1]))
    assert " ".join(line[6:] for line in above[::-1]) == why


@pytest.mark.parametrize(
    "numerics", [{}, {"divide": "post"}, {"divide": "pre", "divide_by": "micro-batches"}]
)
def test_complete_division_needs_no_comment(found, numerics):
    found.numerics |= numerics
    assert (
        "#" not in CliRunner().invoke(rules, ["--target", "zero_sim"]).stdout.split("numerics")[1]
    )
    assert found.as_dict()["undivided"] == {}


def test_limits_are_printed_with_their_first_cases(found):
    found.limits["AssertionError at optim.py:8: 12 % 7"] = ["a", "b", "c", "d"]
    ended = CliRunner().invoke(rules, ["--target", "zero_sim"])
    assert ended.exit_code == 0
    assert "  AssertionError at optim.py:8: 12 % 7: 'a', 'b', 'c', ..." in ended.stdout


def test_unclear_rule_is_printed_as_undetermined(found):
    found.unclear.append("norm: taken as told")
    ended = CliRunner().invoke(rules, ["--target", "zero_sim"])
    assert "Could not be determined:\n  norm: taken as told\n" in ended.stdout
