"""Faults that an eager world cannot find; a late world finds them and names the line.

Three classes of bugs. ASYNC: a missing wait. ORDER: works waited for as if they completed in the
order of their issue. ALIAS: memory reused while a collective still reads or writes it. Each fault
waits for everything in the end, so only the timing reveals it.
"""

import pytest
import torch.distributed as dist

from zero_sim.scenario.spec import RunSpec, SystemSpec, WorldSpec
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.schedule import UnderBackward
from zero_sim.zero.states import GradState, ParamState
from zero_sim.zero.unit import Unit

SYSTEM = SystemSpec(bucket_elems=40, overlap_grads=True, overlap_params=True)


class Late:
    """Works waited for only when the next step begins or the run ends."""

    def __init__(self, patch):
        self._works = {}
        for name in ("zero_grad_buffer", "finish_param_gather"):
            patch.setattr(DistributedDataParallel, name, self._wait_around(name))

    def put_off(self, unit, field):
        work = getattr(unit, field)
        if work is not None:
            self._works.setdefault(unit, []).append(work)
            setattr(unit, field, None)

    def _wait_around(self, name):
        right = getattr(DistributedDataParallel, name)

        def waiting(ddp):
            self._wait(ddp)
            right(ddp)
            self._wait(ddp)

        return waiting

    def _wait(self, ddp):
        for buffer in ddp.buffers:
            for unit in buffer.units:
                for work in self._works.pop(unit, ()):
                    work.wait()


def gradients_read_before_the_wait(patch):
    """ASYNC: after a barrier, as if all issued works were complete."""
    late = Late(patch)

    def wait(unit):
        dist.barrier()
        late.put_off(unit, "_reducing")

    patch.setattr(Unit, "_wait_reduce", wait)


def params_read_before_the_wait(patch):
    """ASYNC: the same in the forward."""
    late = Late(patch)

    def wait(unit):
        if unit.gathering:
            dist.barrier()
        late.put_off(unit, "_gathering")
        unit.param_state = ParamState.WHOLE

    patch.setattr(Unit, "finish_gather", wait)


def only_the_last_bucket_waited_for(patch):
    """ORDER: the reductions were issued in order, so the last one is assumed to complete last."""
    late = Late(patch)

    def finish(pipeline):
        while pipeline._issued_count < len(pipeline._units):
            pipeline._issue_next()
        pipeline._units[-1].finish_reduce()
        for unit in pipeline._units:
            late.put_off(unit, "_reducing")
            unit.grad_state = GradState.REDUCED
        pipeline._issued_count = 0
        pipeline._issued.clear()
        pipeline.running = False

    patch.setattr(UnderBackward, "finish", finish)


def gradients_cleared_in_flight(patch):
    """ALIAS: other ranks' shards are cleared as if they had been sent."""
    right = Unit.start_reduce

    def start(unit):
        right(unit)
        dist.barrier()
        own = unit.grad_shard
        for part in unit.grads.split(max(1, own.numel())):
            if part.data_ptr() != own.data_ptr():
                part.zero_()

    patch.setattr(Unit, "start_reduce", start)


FAULTS = [
    gradients_read_before_the_wait,
    params_read_before_the_wait,
    only_the_last_bucket_waited_for,
    gradients_cleared_in_flight,
]
LINES = {
    gradients_read_before_the_wait: "optimizer.py:",
    params_read_before_the_wait: "workloads/",
    only_the_last_bucket_waited_for: "optimizer.py:",
    gradients_cleared_in_flight: "test_late_faults.py:",
}
by_name = pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)


def run(judged, timing, *, races=False, seed=0):
    world = WorldSpec(size=3, timing=timing, races=races)
    return judged(system=SYSTEM, world=world, run=RunSpec(steps=2, seed=seed))


@by_name
def test_eager_world_passes_the_fault(judged, monkeypatch, plant):
    plant(monkeypatch)
    result = run(judged, "eager")
    assert (result.verdict, result.findings) == ("pass", ())


@by_name
@pytest.mark.parametrize("seed", range(3))
def test_hostile_world_finds_the_fault(judged, monkeypatch, plant, seed):
    plant(monkeypatch)
    assert run(judged, "hostile", seed=seed).verdict == "fail"


@by_name
@pytest.mark.parametrize("timing", ["eager", "hostile"])
def test_race_is_named_with_its_line(judged, monkeypatch, plant, timing):
    plant(monkeypatch)
    finding = run(judged, timing, races=True).findings[0]
    assert finding.check == "world.race"
    assert LINES[plant] in finding.message + finding.detail
