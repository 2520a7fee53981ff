"""Scenario files as tests, in a user's test session."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from zero_sim.targets import import_target, registry

pytest_plugins = ["pytester"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "printed_zero"

SCENARIO = """
    schema = 1
    [model]
    name = "mlp"
    [optimizer]
    name = "sgd"
    lr = 0.1
    [matrix]
    "world.size" = [2, 3]
"""


def test_named_scenario_file_gives_one_test_per_case(pytester, run):
    path = pytester.makefile(".toml", sums=SCENARIO)
    run(str(path)).assert_outcomes(passed=2)


def test_only_scenarios_of_the_ini_option_are_collected(pytester, run):
    for folder in ("cases", "other"):
        pytester.mkdir(folder).joinpath("sums.toml").write_text(SCENARIO)
    pytester.makeini("[pytest]\nzero_sim_scenarios = cases\n")
    run().assert_outcomes(passed=2)


def test_wrong_scenario_names_its_problems(pytester, run):
    path = pytester.makefile(".toml", wrong=SCENARIO.replace('"sgd"', '"sdg"'))
    result = run(str(path))
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*optimizer.name*"])


def test_failing_case_shows_its_finding_and_command(pytester, run):
    text = SCENARIO + '\n    [expect]\n    nonzero_min = 1.0\n    [data]\n    ranks = "same"\n'
    path = pytester.makefile(".toml", zeros=text.replace('"mlp"', '"unusual"'))
    result = run(str(path), "--junitxml=out.xml")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*guard.zero-gradients*", "*zero-sim run *zeros.toml -k *"])
    xml = pytester.path.joinpath("out.xml").read_text()
    assert 'name="zero_sim.verdict" value="inconclusive"' in xml
    assert 'name="zero_sim.reproduce"' in xml


FAILING = SCENARIO + '\n    [expect]\n    finding = "equality.grad"\n'


def _properties(xml):
    cases = ElementTree.fromstring(xml).iter("testcase")
    return {
        case.get("name"): {p.get("name"): p.get("value") for p in case.iter("property")}
        for case in cases
    }


@pytest.mark.parametrize("args", [(), ("-n", "2")], ids=["one process", "xdist"])
def test_failing_case_writes_a_bundle_and_shows_its_replay_command(pytester, plugin_options, args):
    path = pytester.makefile(".toml", misses=FAILING)
    load = (*plugin_options, "-p", "no:cacheprovider")
    # xdist workers are separate processes, which do not share this process's modules.
    run = pytester.runpytest_subprocess if args else pytester.runpytest_inprocess
    result = run(*load, str(path), "--junitxml=out.xml", "--zero-sim-bundles=kept", *args)
    result.assert_outcomes(failed=2)
    bundles = {folder.name for folder in pytester.path.joinpath("kept").iterdir()}
    assert len(bundles) == 2
    for bundle in bundles:
        result.stdout.fnmatch_lines([f"*replay: zero-sim replay {bundle} --bundles kept"])
    properties = _properties(pytester.path.joinpath("out.xml").read_text()).values()
    assert {found["zero_sim.bundle"] for found in properties} == bundles
    for found in properties:
        assert found["zero_sim.verdict"] == "fail"
        assert found["zero_sim.reproduce"].startswith(f"zero-sim run {path} -k misses")
        assert found["zero_sim.replay"].endswith("--bundles kept")


def test_passing_case_writes_no_bundle(pytester, run):
    path = pytester.makefile(".toml", sums=SCENARIO)
    run(str(path)).assert_outcomes(passed=2)
    assert not pytester.path.joinpath(".zero-sim").exists()


def test_unwritable_bundle_folder_keeps_the_verdict(pytester, run):
    pytester.makefile(".txt", kept="a file")
    path = pytester.makefile(".toml", misses=FAILING)
    result = run(str(path), "--zero-sim-bundles=kept.txt")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*expect.finding*", "*no bundle in kept.txt*"])


def test_missing_path_in_the_ini_option_is_refused(pytester, run):
    pytester.makeini("[pytest]\nzero_sim_scenarios = casse\n")
    assert "expected zero_sim_scenarios to name files and folders" in "\n".join(run().errlines)


def test_scope_of_a_pass_is_a_property(pytester, run, monkeypatch):
    """The printed system reports only params, and only supports AdamW."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    target = import_target("printed_zero:STAGE_1_MENDED")
    monkeypatch.setitem(registry._TARGETS, target.name, "printed_zero")
    monkeypatch.setattr("printed_zero.TARGETS", (target,), raising=False)
    text = SCENARIO.replace('name = "sgd"', 'name = "adamw"')
    path = pytester.makefile(".toml", printed=f'{text}\n[system]\ntarget = "{target.name}"\n')
    result = run(str(path), "--junitxml=out.xml")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["zero_sim: 2 passed by params only: *"])
    found = _properties(pytester.path.joinpath("out.xml").read_text())
    assert {each["zero_sim.scope"] for each in found.values()} == {"params-only"}


def test_scope_of_a_conformance_test_is_in_properties_and_summary(pytester, run):
    pytester.makepyfile(
        """
        from tests.run.summing import UndividedAdam
        from zero_sim.testing import conformance

        test_mine = conformance(UndividedAdam(), cases=1)

        def test_other():
            pass
        """
    )
    result = run("-rA", "--junitxml=out.xml")
    result.assert_outcomes(passed=2)
    said = "1 pass (1 by params only)"
    result.stdout.fnmatch_lines(
        [f"conformance of summing: {said}", "zero_sim: 1 passed by params only: *"]
    )
    found = _properties(pytester.path.joinpath("out.xml").read_text())
    assert found == {
        "test_mine": {"zero_sim.scope": "params-only", "zero_sim.verdicts": said},
        "test_other": {},
    }


def test_fully_compared_session_prints_no_scope_summary(pytester, run):
    path = pytester.makefile(".toml", sums=SCENARIO)
    result = run(str(path))
    result.assert_outcomes(passed=2)
    result.stdout.no_fnmatch_line("zero_sim:*")
