"""Library state that each simulated rank has for itself, if the target declares it."""

import importlib
import sys
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch

from tests.run.keeper import LIBRARY, NAMES, Keeper
from zero_sim import run_case
from zero_sim.rules.rank_globals import find_rank_globals
from zero_sim.run.rank_local import as_in_new_process
from zero_sim.scenario.spec import ModelSpec, RunSpec, Scenario, SystemSpec, WorldSpec
from zero_sim.targets import Capabilities, Library, Numerics, RankLocal
from zero_sim.targets.torch.ddp import DDPEngine

MODEL = ModelSpec(name="mlp", hidden=3)
CASE = Scenario(
    schema=1, name="case", model=MODEL, system=SystemSpec(stage=0), run=RunSpec(steps=2)
)


@pytest.fixture
def judged_fp32(pool):
    case = replace(CASE, world=WorldSpec(size=3))
    return lambda target: run_case(case, pool=pool, target=target)


@pytest.fixture
def library(tmp_path, monkeypatch):
    (tmp_path / "keeper_lib.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("keeper_lib", None)


@pytest.mark.usefixtures("library")
def test_shared_globals_are_found_with_the_declaration_to_add(judged_fp32):
    result = judged_fp32(target=Keeper())
    assert result.verdict == "fail"
    said = " ".join(finding.message + finding.detail for finding in result.findings)
    assert "group" in said
    assert "rank_local" in said


@pytest.mark.usefixtures("library")
def test_declared_names_are_rank_local(judged_fp32):
    assert judged_fp32(target=Keeper(RankLocal(names=NAMES))).verdict == "pass"


@pytest.mark.usefixtures("library")
def test_star_declares_all_globals_of_a_module(judged_fp32):
    names = ("keeper_lib:*", *(name for name in NAMES if "Engine" in name))
    assert judged_fp32(target=Keeper(RankLocal(names=names))).verdict == "pass"


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("left_out", NAMES)
def test_each_kind_of_name_is_needed(judged_fp32, left_out):
    names = tuple(name for name in NAMES if name != left_out)
    assert judged_fp32(target=Keeper(RankLocal(names=names))).verdict == "fail"


@pytest.mark.usefixtures("library")
def test_every_program_starts_from_the_original_state(judged_fp32):
    target = Keeper(RankLocal(names=NAMES))
    assert [judged_fp32(target=target).verdict for _ in range(2)] == ["pass", "pass"]
    library = sys.modules["keeper_lib"]
    assert (library.GROUP, library.SEEN, library.Engine.built) == (None, [], 0)
    assert library.Engine.register.__defaults__ == ([0],)


@pytest.mark.usefixtures("library")
def test_package_can_be_imported_per_rank(judged_fp32):
    target = Keeper(RankLocal(packages=("keeper_lib",)))
    assert [judged_fp32(target=target).verdict for _ in range(2)] == ["pass", "pass"]
    assert "keeper_lib" not in sys.modules


@pytest.mark.usefixtures("library")
def test_kept_names_are_found_by_running_two_ranks():
    found = find_rank_globals(
        Keeper(), [replace(CASE, world=WorldSpec(size=2))], packages=["keeper_lib"]
    )
    assert found.names == NAMES
    assert [result.verdict for result in found.results] == ["pass"]


LACKED = {
    "keeper_lib.newer:GROUP": "no module 'keeper_lib.newer'",
    "keeper_lib.newer:*": "no module 'keeper_lib.newer'",
    "keeper_lib:Motor.built": "no 'Motor' in it",
    "keeper_lib:Engine.register(number)": "no default of 'number' in it",
}
"""Names that only other versions of the library have."""


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("name", LACKED)
def test_missing_name_is_skipped_with_a_note(judged_fp32, name):
    result = judged_fp32(target=Keeper(RankLocal(names=(name, *NAMES))))
    assert result.verdict == "pass"
    assert f"rank-local name {name!r} is skipped: {LACKED[name]}" in result.notes


@pytest.mark.usefixtures("library")
def test_missing_name_on_a_real_rank_is_skipped_with_a_note():
    notes = []
    declared = RankLocal(names=("keeper_lib:Motor.built",))
    with as_in_new_process(Keeper(declared), ranks_max=2, notes=notes):
        pass
    assert notes == ["rank-local name 'keeper_lib:Motor.built' is skipped: no 'Motor' in it"]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("judged", "is_said"), [("0.0.1", True), (version("pytest"), False)])
def test_finding_names_another_version_than_the_judged_one(judged_fp32, judged, is_said):
    """The keeper fails without rank-local names; pytest stands in for the library."""
    target = Keeper()
    target.library = Library(package="keeper_lib", extra="keeper", judged=f"pytest=={judged}")
    result = judged_fp32(target=target)
    assert result.verdict == "fail"
    said = f"pytest {version('pytest')} is installed; target 'keeper' declares the rules of pytest"
    assert (said in result.findings[0].detail) == is_said


class CudaEngine(DDPEngine):
    """Computes on the GPU that torch reports."""

    def backward(self, loss, *, last_micro, rows):
        on_gpu = loss.cuda().to(f"cuda:{torch.cuda.current_device()}")
        assert torch.zeros(1, device="cuda").type() == "torch.cuda.FloatTensor"
        super().backward(on_gpu, last_micro=last_micro, rows=rows)


class CudaTarget:
    """System that always calls torch.cuda."""

    name = "on-cuda"
    capabilities = Capabilities(stages=(0,))
    numerics = Numerics(divide="premul")

    def __init__(self, *, cuda_is_cpu):
        self.rank_local = RankLocal(cuda_is_cpu=cuda_is_cpu)

    def build(self, module, *, scenario, group):
        return CudaEngine(module, scenario=scenario, group=group)


def test_cuda_calls_run_on_the_cpu_if_declared(judged_fp32):
    assert judged_fp32(target=CudaTarget(cuda_is_cpu=True)).verdict == "pass"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_calls_fail_without_the_declaration(judged_fp32):
    judged_fp32(target=CudaTarget(cuda_is_cpu=True))
    assert not torch.cuda.is_available()
    assert judged_fp32(target=CudaTarget(cuda_is_cpu=False)).verdict == "fail"


@pytest.mark.usefixtures("library")
def test_real_rank_starts_every_program_from_the_original_state():
    kept = importlib.import_module("keeper_lib")
    for _ in range(2):
        with as_in_new_process(Keeper(RankLocal(names=NAMES)), ranks_max=2):
            assert (kept.SEEN, kept.Engine.built, kept.Engine().register()) == ([], 0, 1)
            kept.SEEN.append("this program's")
            kept.Engine.built += 1
    assert (kept.SEEN, kept.Engine.built) == ([], 0)
