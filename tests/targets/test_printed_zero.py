"""Per-param ZeRO as articles print it, an example: what is found, and that mended it is right."""

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
    """Judge a printed target on bare params, or on an mlp without shapes."""

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


def test_stage_1_is_right_where_the_ranks_divide_every_param(judged):
    result = judged("STAGE_1", shapes=((4,), (2, 4)), size=4)
    assert result.verdict == "pass", result.findings


@pytest.mark.parametrize("elems", [1, 3, 5, 7])
def test_and_fails_where_they_do_not(judged, elems):
    result = judged("STAGE_1", shapes=((4,), (elems,)), size=4)
    assert [finding.check for finding in result.findings] == ["world.rank-failed"]
    assert "assign a gradient of size" in result.findings[0].message


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_mended_it_is_right_for_every_size(judged, size):
    shapes = ((size - 1,), (size,), (size + 1,), (1,), (0,), (), (2, 3))
    result = judged("STAGE_1_MENDED", shapes=shapes, size=size)
    assert result.verdict == "pass", result.findings


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_stage_3_frees_before_backward_needs(judged):
    result = judged("STAGE_3", size=2)
    assert [finding.check for finding in result.findings] == ["world.rank-failed"]
    assert "size of tensor a (0)" in result.findings[0].message


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("path", sorted(EXAMPLE.glob("*.toml")), ids=lambda path: path.stem)
def test_its_scenarios_run_as_their_first_lines_say(target_named, path):
    name = path.read_text().partition("\n")[0].rpartition(":")[2]
    for case in load_cases(path):
        result = run_case(case, target=target_named(name))
        assert result.verdict == "pass", result.findings
