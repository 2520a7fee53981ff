"""Cases with `world.races`: zero_sim's own system has none, and each race is a finding."""

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
def test_overlapped_system_has_no_race(judged, redundancy, sync, partition):
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


def test_detection_does_not_change_the_run(judged):
    plain = judged(world=WorldSpec(size=4), system=OVERLAPPED)
    watched = judged(world=WORLD, system=OVERLAPPED)
    assert watched.log_digest == plain.log_digest
    assert watched.compared_elems == plain.compared_elems


def test_reload_has_no_race(judged):
    result = judged(
        world=WORLD,
        system=OVERLAPPED,
        run=RunSpec(steps=4),
        reload=ReloadSpec(step=2, world_size=3),
    )
    assert (result.verdict, result.findings) == ("pass", ())


def test_forward_without_a_wait_for_params_is_a_race(judged, monkeypatch):
    monkeypatch.setattr(UnderForward, "_before_forward", lambda *args: None)
    finding = race_in(judged(world=WORLD, system=OVERLAPPED))
    assert finding.rank is not None
    assert "reads elements" in finding.message
    assert "of the output of all_gather #" in finding.message


def test_optimizer_without_a_wait_for_gradients_is_a_race(judged, monkeypatch):
    def forget(self):
        self._reducing = None

    monkeypatch.setattr(Unit, "_wait_reduce", forget)
    finding = race_in(judged(world=WORLD, system=OVERLAPPED))
    assert "reads elements" in finding.message
    assert "of the output of reduce_scatter #" in finding.message
    assert "optimizer.py" in finding.message


class SlowEngine(ZeroSimEngine):
    """Leaves params in flight until the next step, after the judge has read them."""

    works = ()
    held_bytes = None  # No declared costs, because of its extra broadcasts.
    unwrap = None  # No unwrap, because works are in flight.

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
    """Reads the params in flight itself."""

    name = "hasty"
    capabilities = None

    def build(self, module, *, scenario, group):
        engine = SlowEngine(module, scenario=scenario, group=group)
        engine.settle = lambda: [torch.sum(param) for param in engine.params().values()]
        return engine


def test_reads_of_the_judge_are_not_races(judged):
    # Not strict, because the last step's works are never waited for.
    lax = WorldSpec(size=4, races=True, strict=False)
    result = judged(target=SlowTarget(), world=lax, run=RunSpec(steps=2))
    assert (result.verdict, result.findings) == ("pass", ())
    assert "aten::sum" in race_in(judged(target=HastyTarget(), world=WORLD)).message
