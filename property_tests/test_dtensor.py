"""Drawn DTensor programs, bit for bit on simulated ranks and gloo processes."""

import importlib
import math
import sys
from pathlib import Path

import pytest

from tests.profiles import is_nightly

NIGHTLY_PROGRAMS = 5000
PROGRAMS_A_MESH = 6
RANKS_MAX = 4
"""Few, because each number of ranks starts its own processes."""


@pytest.fixture(scope="module")
def dtensor_programs():
    """The neighbouring module, under the name by which workers import it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        yield importlib.import_module("dtensor_programs")
        sys.modules.pop("dtensor_programs")


@pytest.fixture(scope="module")
def comparison(dtensor_programs):
    with dtensor_programs.open_teams() as teams:
        opened = dtensor_programs.Comparison(teams)
        yield opened
        opened.close()


@pytest.mark.timeout(3600 if is_nightly() else 120)
def test_simulated_ranks_match_gloo_processes(comparison, dtensor_programs):
    if is_nightly():
        batches = dtensor_programs.draw_batches(NIGHTLY_PROGRAMS, "nightly")
    else:
        meshes = [mesh for mesh in dtensor_programs.MESHES if math.prod(mesh) <= RANKS_MAX]
        count = PROGRAMS_A_MESH * len(meshes)
        batches = dtensor_programs.draw_batches(count, "ci", batch=PROGRAMS_A_MESH, meshes=meshes)
    for seed, (mesh, programs) in enumerate(batches):
        assert comparison.differences(mesh, programs, seed=seed) == []
