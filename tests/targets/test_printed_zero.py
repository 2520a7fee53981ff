"""Example of per-param ZeRO as articles print it: its faults are found, and the fixed one
passes.
"""

from pathlib import Path

import pytest

from zero_sim import run_case
from zero_sim.scenario.load import load_cases
from zero_sim.scenario.spec import ModelSpec, RunSpec, Scenario, SystemSpec, WorldSpec
from zero_sim.targets import import_target

EXAMPLE = Path(__file__).parents[2] / "examples" / "printed_zero"


@pytest.fixture
def target_named(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return lambda name: import_target(f"printed_zero:{name}")


@pytest.fixture
def judged(target_named):
    """Judge a printed target on bare params, or on an mlp if no shapes are given."""

    def judge(name, *, size, shapes=None):
        model = (
            ModelSpec(name="params", shapes=shapes) if shapes else ModelSpec(name="mlp", hidden=5)
        )
        case = Scenario(
            schema=1,
            model=model,
            world=WorldSpec(size=size),
            system=SystemSpec(stage=3 if "3" in name else 1),
            run=RunSpec(steps=2),
        )
        return run_case(case, target=target_named(name))

    return judge


def test_stage_1_passes_if_ranks_divide_every_param(judged):
    result = judged("STAGE_1", shapes=((4,), (2, 4)), size=4)
    assert result.verdict == "pass", result.findings


@pytest.mark.parametrize("elems", [1, 3, 5, 7])
def test_stage_1_fails_if_ranks_do_not_divide_a_param(judged, elems):
    result = judged("STAGE_1", shapes=((4,), (elems,)), size=4)
    assert [finding.check for finding in result.findings] == ["world.rank-failed"]
    assert "assign a gradient of size" in result.findings[0].message


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_fixed_stage_1_passes_for_every_size(judged, size):
    shapes = ((size - 1,), (size,), (size + 1,), (1,), (0,), (), (2, 3))
    result = judged("STAGE_1_MENDED", shapes=shapes, size=size)
    assert result.verdict == "pass", result.findings


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_stage_3_frees_params_before_backward(judged):
    result = judged("STAGE_3", size=2)
    assert [finding.check for finding in result.findings] == ["world.rank-failed"]
    assert "size of tensor a (0)" in result.findings[0].message


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("path", sorted(EXAMPLE.glob("*.toml")), ids=lambda path: path.stem)
def test_example_scenarios_have_their_expected_results(target_named, path):
    name = path.read_text().partition("\n")[0].rpartition(":")[2]
    for case in load_cases(path):
        result = run_case(case, target=target_named(name))
        assert result.verdict == "pass", result.findings
