"""A case with `world.races`: our own system is clean, and what races is a finding of its own."""

import pytest
import torch
import torch.distributed as dist

from zero_sim.scenario.spec import ReloadSpec, RunSpec, SystemSpec, WorldSpec
from zero_sim.targets.own import ZeroSimEngine
from zero_sim.zero.gathers import UnderForward
from zero_sim.zero.unit import Unit

WORLD = WorldSpec(size=4, races=True)
OVERLAPPED = SystemSpec(bucket_elems=60, overlap_grads=True, overlap_params=True)


def race_in(result):
    assert result.verdict == "fail", result
    assert result.findings[0].check == "world.race", result.findings
    return result.findings[0]


@pytest.mark.parametrize("redundancy", [1, 2])
@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("partition", ["padded", "uneven"])
def test_the_overlapped_system_is_clean(judged, redundancy, sync, partition):
    system = SystemSpec(
        bucket_elems=60,
        overlap_grads=True,
        overlap_params=True,
        redundancy=redundancy,
        sync=sync,
        partition=partition,
    )
    result = judged(world=WORLD, system=system, run=RunSpec(steps=3, micro_batches=2))
    assert (result.verdict, result.findings) == ("pass", ())
    assert all(float(note.rpartition(" ")[2]) > 0 for note in result.notes)


def test_detection_changes_nothing_that_is_judged(judged):
    plain = judged(world=WorldSpec(size=4), system=OVERLAPPED)
    watched = judged(world=WORLD, system=OVERLAPPED)
    assert watched.log_digest == plain.log_digest
    assert watched.compared_elems == plain.compared_elems


def test_a_reload_is_clean(judged):
    result = judged(
        world=WORLD,
        system=OVERLAPPED,
        run=RunSpec(steps=4),
        reload=ReloadSpec(step=2, world_size=3),
    )
    assert (result.verdict, result.findings) == ("pass", ())


def test_a_forward_that_does_not_wait_for_its_params(judged, monkeypatch):
    monkeypatch.setattr(UnderForward, "_before_forward", lambda *args: None)
    finding = race_in(judged(world=WORLD, system=OVERLAPPED))
    assert finding.rank is not None
    assert "reads elements" in finding.message
    assert "of the output of all_gather #" in finding.message


def test_an_optimizer_that_does_not_wait_for_its_gradients(judged, monkeypatch):
    def forget(self):
        self._reducing = None

    monkeypatch.setattr(Unit, "_wait_reduce", forget)
    finding = race_in(judged(world=WORLD, system=OVERLAPPED))
    assert "reads elements" in finding.message
    assert "of the output of reduce_scatter #" in finding.message
    assert "optimizer.py" in finding.message


class SlowEngine(ZeroSimEngine):
    """Leaves its params in flight until the next step begins, when the judge has looked at them."""

    works = ()
    held_bytes = None  # It broadcasts once more than its stage needs, and declares no costs.
    unwrap = None  # With what it leaves in flight it gives no module back.

    def zero_grad(self):
        for work in self.works:
            work.wait()
        self.works = ()
        super().zero_grad()

    def step(self, *, lr_factor):
        result = super().step(lr_factor=lr_factor)
        self.works = [
            dist.broadcast(param, src=0, async_op=True) for param in self.params().values()
        ]
        return result


class SlowTarget:
    name = "slow"
    capabilities = None

    def build(self, module, *, scenario, group):
        return SlowEngine(module, scenario=scenario, group=group)


class HastyTarget:
    """The same, but it looks for itself."""

    name = "hasty"
    capabilities = None

    def build(self, module, *, scenario, group):
        engine = SlowEngine(module, scenario=scenario, group=group)
        engine.settle = lambda: [torch.sum(param) for param in engine.params().values()]
        return engine


def test_what_the_judge_reads_is_not_charged_to_the_system(judged):
    # Not strict: nobody waits for what the last step leaves in flight.
    lax = WorldSpec(size=4, races=True, strict=False)
    result = judged(target=SlowTarget(), world=lax, run=RunSpec(steps=2))
    assert (result.verdict, result.findings) == ("pass", ())
    assert "aten::sum" in race_in(judged(target=HastyTarget(), world=WORLD)).message
