"""Families of drawn cases: a shared reference gives the verdicts of separate references."""

import os
from itertools import islice

import pytest

from zero_sim import run_case
from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.families import has_family, siblings
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.judge.step_source import StepSource
from zero_sim.judge.trajectory import Trajectories
from zero_sim.targets import find_target

_FAMILIES = 200 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 12
_MEMBERS = 5


@pytest.fixture
def left(monkeypatch):
    """Step sources that fell back although their next step was stored."""
    found = []
    right = StepSource.fall_back

    def fall_back(self):
        placed = tuple(each._placed for each in self.peers)
        if self._shared is not None and self._shared.find(self._next_step, placed=placed):
            found.append(self)
        right(self)

    monkeypatch.setattr(StepSource, "fall_back", fall_back)
    return found


def facts(result):
    return result.verdict, result.findings, result.compared_elems, result.guarantees, result.notes


# torch warns if a rank has no shard with a gradient.
@pytest.mark.filterwarnings("ignore:Called FSDP.clip_grad_norm_")
@pytest.mark.parametrize("name", ["zero_sim", "torch-fsdp1", "torch-fsdp2", "torch-ddp"])
def test_shared_reference_gives_the_same_verdicts(pool, left, name):
    """A correct system never computes steps that the reference of its family has stored."""
    target = find_target(name)
    firsts = filter(has_family, draws(drawn_cases(target), seed="families"))
    for index, first in enumerate(islice(firsts, _FAMILIES)):
        kept = Trajectories()
        others = siblings(first, target=target, most=_MEMBERS, seed=f"families/{index}")
        for member in (first, *others):
            alone = run_case(member, pool=pool, target=target)
            assert facts(run_case(member, pool=pool, target=target, trajectories=kept)) == facts(
                alone
            )
            assert alone.verdict in ("pass", "inconclusive")
            assert not left
