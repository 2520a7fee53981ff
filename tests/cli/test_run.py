"""`zero-sim run`: output and exit status."""

import contextlib
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from tests.cli.ended import assert_ended
from zero_sim.cli import main as cli
from zero_sim.errors import EnvironmentProblem, ModelError
from zero_sim.findings.records import CaseResult, Finding
from zero_sim.run import judges

GOOD = 'schema = 1\n[model]\nname = "mlp"\n'
BAD = 'schema = 1\n[model]\nname = "mpl"\n[run]\nsteps = 0\n'


def judge_by_name(scenario):
    """Return the result, or raise the error, for the name of a scenario."""
    name = scenario.name
    if name == "environment":
        raise EnvironmentProblem("expected scikit-learn, which is not installed.")
    if name == "usage":
        raise ModelError("expected a model with params, got none.")
    if name == "crash":
        raise RuntimeError("boom")
    if name == "interrupt":
        raise KeyboardInterrupt
    if name == "refused":
        return CaseResult(id=name, verdict="error", seconds=0.0, error="expected params, got none")
    if name in ("fail", "inconclusive"):
        finding = Finding(check="equality.params", message="differs", step=1)
        return CaseResult(id=name, verdict=name, seconds=0.1, findings=(finding,))
    print("a model that prints")  # noqa: T201
    notes = ("a note",) if name == "noted" else ()
    unobserved = ("norm",) if name == "silent" else ()
    return CaseResult(
        id=name, verdict="pass", seconds=0.1, compared_elems=10, notes=notes, unobserved=unobserved
    )


@pytest.fixture
def invoke(monkeypatch, tmp_path):
    """Run the command in a folder with one scenario per name, judged by `judge_by_name`."""

    @contextlib.contextmanager
    def open_judge(chosen):
        yield judge_by_name

    monkeypatch.setattr(judges, "open_judge", open_judge)
    monkeypatch.chdir(tmp_path)

    def call(*names, options=()):
        for name in names:
            Path(f"{name}.toml").write_text(BAD if name.startswith("bad") else GOOD)
        arguments = ["run", *(f"{name}.toml" for name in names), *options]
        return CliRunner().invoke(cli.main, arguments)

    return call


@pytest.mark.parametrize(
    ("names", "status"),
    [
        (["pass"], 0),
        (["fail"], 1),
        (["crash"], 1),
        (["usage"], 2),
        (["refused"], 2),
        (["bad"], 2),
        (["inconclusive"], 3),
        (["environment"], 4),
        (["pass", "fail", "usage", "environment", "inconclusive", "bad"], 1),
        (["pass", "environment", "usage", "inconclusive"], 2),
        (["pass", "environment", "bad"], 2),
        (["pass", "inconclusive", "environment"], 4),
        (["inconclusive", "pass"], 3),
    ],
)
def test_exit_status_is_that_of_the_most_severe_result(invoke, names, status):
    """Precedence is 1, 2, 4, 3."""
    assert invoke(*names).exit_code == status


def test_every_case_runs_after_any_result(invoke):
    result = invoke("bad", "crash", "environment", "usage", "pass")
    marks = [line.split()[0] for line in result.stdout.splitlines() if line[:1].isupper()]
    assert marks == ["ERROR", "ERROR", "ERROR", "PASS"]
    assert result.stdout.splitlines()[-1].startswith("4 cases: 1 passed, 3 errors in ")
    assert result.stdout.endswith("; 1 file could not be read\n")


@pytest.mark.parametrize(
    ("names", "options", "shown"),
    [(["noted"], (), 1), (["noted", "pass"], (), 0), (["noted", "pass"], ("-v",), 1)],
)
def test_notes_of_passing_cases_are_printed_for_one_case_or_verbose(invoke, names, options, shown):
    """Notes of many cases would hide the lines."""
    assert invoke(*names, options=options).stdout.count("  note: a note") == shown


class TestManyCases:
    NAMES = tuple(f"pass{number}" for number in range(50))

    def test_each_pass_is_a_dot(self, invoke):
        result = invoke(*self.NAMES, "fail")
        assert result.stdout.count("FAIL") == 1
        assert "PASS" not in result.stdout
        assert result.stdout.splitlines()[-1].startswith("51 cases: 50 passed, 1 failed in ")
        row, last = result.stderr.splitlines()[:2]
        assert row == 50 * "." + "  [50/51]"
        # The report of the failed case started a new line.
        assert last == "F" + 49 * " " + "  [51/51]"

    def test_each_case_is_printed_with_verbose(self, invoke):
        result = invoke(*self.NAMES, options=("-v",))
        assert result.stdout.count("PASS") == 50
        assert "[50/50]" not in result.stderr

    def test_cover_selects_few_cases_with_all_features(self, invoke):
        Path("many.toml").write_text(
            GOOD + '[matrix]\n"run.seed" = [1, 2, 3]\n"system.stage" = [1, 2]\n'
        )
        result = invoke("pass", options=("many.toml", "--cover", "--json"))
        report = json.loads(result.stdout)
        assert [case["id"] for case in report["cases"]] == ["pass", "many/seed=1,stage=2"]
        why = "features and pairs of features are covered without it"
        assert report["left_out"] == {why: 5}


def test_all_problems_of_a_file_are_printed(invoke):
    result = invoke("bad", "pass")
    assert "bad.toml: 2 problems" in result.stderr
    assert 'Did you mean "mlp"?' in result.stderr
    assert "run.steps: expected an integer at least 1" in result.stderr
    assert "PASS" in result.stdout


def test_own_errors_have_no_traceback(invoke):
    assert "Traceback" not in invoke("environment", "usage", "bad").output


def test_unexpected_errors_have_a_traceback(invoke):
    out = invoke("crash").stdout
    assert "RuntimeError: boom" in out.splitlines()[0]
    assert "internal.error: zero_sim raised an unexpected error" in out
    assert "Traceback" in out


def test_failure_contains_its_reproduce_command(invoke):
    assert "  reproduce: zero-sim run fail.toml -k fail" in invoke("fail").stdout


def test_stall_limit_applies_to_cases_and_printed_commands(invoke, monkeypatch):
    seen = []

    @contextlib.contextmanager
    def open_judge(chosen):
        yield lambda scenario: seen.append(scenario.run.stall_seconds) or judge_by_name(scenario)

    monkeypatch.setattr(judges, "open_judge", open_judge)
    result = invoke("fail", options=("--stall-seconds", "2.5"))
    assert seen == [2.5]
    assert "reproduce: zero-sim run fail.toml -k fail --stall-seconds 2.5" in result.stdout
    invoke("fail")
    assert seen == [2.5, 60.0]


@pytest.mark.parametrize("seconds", ["0", "-1", "soon"])
def test_invalid_stall_limit_is_refused(invoke, seconds):
    assert invoke("pass", options=("--stall-seconds", seconds)).exit_code == 2


def test_expression_selects_cases(invoke):
    result = invoke("pass", "fail", options=("-k", "not fail"))
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].startswith("1 case: 1 passed")


def test_empty_selection_has_exit_status_5(invoke):
    result = invoke("pass", "fail", options=("-k", "nothing"))
    assert_ended(result, 5, "2 cases, none matches -k 'nothing'", on="stderr")


def test_malformed_expression_is_refused(invoke):
    result = invoke("pass", options=("-k", "a and"))
    assert_ended(result, 2, "Error: -k 'a and': expected a word", on="stderr")
    assert result.stdout == ""


def test_missing_path_is_refused_and_other_cases_run(invoke):
    result = invoke("pass", options=("gone.toml",))
    assert_ended(result, 2, "gone.toml: 1 problem", on="stderr")
    assert "1 passed" in result.stdout


def test_interrupt_prints_finished_cases(invoke):
    result = invoke("pass", "interrupt", "fail")
    assert result.exit_code == 130
    assert "Interrupted during interrupt." in result.stderr
    assert result.stdout.splitlines()[-1].startswith("3 cases: 1 passed, 2 not run in ")


class TestJUnit:
    def test_junit_contains_every_case(self, invoke):
        names = ("bad", "pass", "fail", "interrupt", "noted")
        result = invoke(*names, options=("--junit", "j.xml"))
        assert result.exit_code == 130
        told = {
            case.get("name"): [each.tag for each in case if each.tag != "properties"]
            for case in ElementTree.parse("j.xml").iter("testcase")
        }
        assert told == {
            "bad.toml": ["error", "system-out"],
            "pass": ["system-out"],
            "fail": ["failure", "system-out"],
            "interrupt": ["skipped"],
            "noted": ["skipped"],
        }

    def test_unwritable_junit_path_does_not_change_the_verdict(self, invoke):
        result = invoke("pass", options=("--junit", "pass.toml/j.xml"))
        assert_ended(result, 2, "1 passed", on="stdout")
        assert "expected to write JUnit XML" in result.stderr


def test_unobserved_parts_are_listed_once(invoke):
    lines = invoke("pass", "silent").stdout.splitlines()
    title = "Not observed, because the target does not report it:"
    assert lines[lines.index(title) : -1] == [
        title,
        "compared  not observed  of 2 cases that passed",
        "2                       losses",
        "2                       reduced gradients",
        "2                       division of gradients",
        "1         1             norm",
        "2                       zeros",
        "2                       skipped",
        "2                       masters and optimizer state",
        "2                       working params",
    ]
    assert "not observed" not in invoke("pass", "noted").stdout
    assert "not observed:" not in invoke("silent").stdout


class TestJson:
    def test_stdout_is_one_object(self, invoke):
        result = invoke("pass", "fail", "bad", options=("--json",))
        report = json.loads(result.stdout)
        assert [case["id"] for case in report["cases"]] == ["pass", "fail"]
        assert "a model that prints" in result.stderr

    def test_json_keys_of_a_case(self, invoke):
        """Other programs read these keys."""
        report = json.loads(invoke("fail", options=("--json",)).stdout)
        (case,) = report["cases"]
        assert (case["id"], case["verdict"], case["seconds"]) == ("fail", "fail", 0.1)
        assert case["source"] == "fail.toml"
        (finding,) = case["findings"]
        assert (finding["check"], finding["step"], finding["rank"]) == ("equality.params", 1, None)
        assert report["exit_status"] == 1

    def test_json_keys_of_a_problem(self, invoke):
        report = json.loads(invoke("bad", options=("--json",)).stdout)
        assert report["cases"] == []
        assert [problem["path"] for problem in report["problems"]] == ["model.name", "run.steps"]
        assert set(report["problems"][0]) == {"source", "path", "message", "suggestion"}

    @pytest.mark.parametrize(
        ("names", "options", "status"), [(["pass"], ("-k", "no"), 5), (["interrupt"], (), 130)]
    )
    def test_json_is_printed_with_any_exit_status(self, invoke, names, options, status):
        result = invoke(*names, options=("--json", *options))
        assert result.exit_code == json.loads(result.stdout)["exit_status"] == status
