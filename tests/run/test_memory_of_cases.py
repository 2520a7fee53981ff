"""A finished case leaves nothing in memory, because one process runs thousands of cases."""

import gc
import weakref

import pytest

from zero_sim import run_case
from zero_sim.backends.worlds import WorldPool
from zero_sim.calculators.measure import measure
from zero_sim.scenario.spec import ModelSpec, RunSpec, Scenario, SystemSpec, WorldSpec
from zero_sim.zero.data_parallel import DistributedDataParallel

WAYS = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 1, "sync": "every"},
    {"stage": 2, "bucket_elems": 30},
    {"stage": 2, "reduce_buffer_elems": 30, "sync": "every"},
    {"stage": 3, "bucket_elems": 30},
]


@pytest.fixture
def built(monkeypatch):
    """Collect weak references to all wrappers that are built."""
    made = []
    right = DistributedDataParallel.__init__

    def noted(self, *args, **named):
        made.append(weakref.ref(self))
        right(self, *args, **named)

    monkeypatch.setattr(DistributedDataParallel, "__init__", noted)
    return made


def case(way):
    return Scenario(
        schema=1,
        name="case",
        model=ModelSpec(name="mlp", hidden=4),
        world=WorldSpec(size=4),
        system=SystemSpec(**way),
        run=RunSpec(steps=2, micro_batches=2),
    )


def alive(built):
    gc.collect()
    return [each() for each in built if each() is not None]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_finished_case_is_freed(built, way):
    with WorldPool() as pool:
        assert run_case(case(way), pool=pool).verdict == "pass"
        first = len(built)
        assert run_case(case({}), pool=pool).verdict == "pass"
        assert first == 4
        assert alive(built[:first]) == []


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_measured_run_is_freed(built, way):
    measure(case(way))
    assert len(built) == 4
    assert alive(built) == []


@pytest.mark.parametrize("sum_by", ["all-reduce", "first-rank"])
def test_memory_of_units_with_two_variants_is_followed(sum_by):
    """The class of such a unit is created at the choice of variants, not in a variant's module."""
    system = SystemSpec(stage=2, sum_by=sum_by, gather_chunk_elems=1, arena=True)
    scenario = Scenario(
        schema=1,
        model=ModelSpec(name="params", shapes=((2,), (3,))),
        world=WorldSpec(size=2, order="linear"),
        system=system,
        run=RunSpec(steps=1),
    )
    result = run_case(scenario)
    assert result.verdict == "pass", result.findings
