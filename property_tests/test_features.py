"""Drawn combinations of all features: all state equals the reference after every step."""

from dataclasses import replace

from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.profiles import at_most
from zero_sim import run_case
from zero_sim.fuzz.shapes import divisors
from zero_sim.fuzz.strategies import scenarios
from zero_sim.reference import POSITION_FREE
from zero_sim.scenario.applies import WITH_FOREACH
from zero_sim.scenario.rules import check_scenario
from zero_sim.shrink.repair import repaired


def assert_not_wrong(scenario, pool):
    result = run_case(scenario, pool=pool)
    note(str(result))
    assert result.verdict in ("pass", "inconclusive")
    assert result.compared_elems > 0


@given(scenario=scenarios())
@settings(max_examples=at_most(1000))
def test_strategies_draw_valid_scenarios(scenario):
    assert check_scenario(scenario) == []


@given(scenario=scenarios())
@settings(max_examples=at_most(250))
def test_system_equals_reference(pool, scenario):
    assert_not_wrong(scenario, pool)


@given(scenario=scenarios(reload=False), data=st.data())
@settings(max_examples=at_most(70))
def test_irrelevant_settings_change_no_bit(pool, scenario, data):
    """Layout, overlap, schedule and foreach change no bit if the order is independent of them.

    Both cases equal a reference without these settings, so they equal each other.
    """
    order = scenario.world.order if scenario.world.order in POSITION_FREE else "linear"
    partition = scenario.system.partition
    system = replace(
        scenario.system,
        bucket_elems=scenario.system.bucket_elems
        if partition == "rows"
        else data.draw(st.none() | st.integers(1, 60)),
        align_elems=data.draw(st.sampled_from([1, 3, 8])) if partition == "padded" else 1,
        param_order=data.draw(st.sampled_from(["registration", "reverse"])),
        overlap_grads=data.draw(st.booleans()),
        overlap_params=scenario.system.stage == 1 and data.draw(st.booleans()),
        gather_chunk_elems=None,
    )
    other = replace(
        scenario,
        system=system,
        world=replace(scenario.world, order=order, schedule="random"),
        optimizer=replace(
            scenario.optimizer,
            foreach=scenario.optimizer.name in WITH_FOREACH and not scenario.optimizer.foreach,
        ),
    )
    assert_not_wrong(replace(scenario, world=replace(scenario.world, order=order)), pool)
    assert_not_wrong(other, pool)


@given(scenario=scenarios(ranks_max=6, steps_max=3, reload=False), data=st.data())
@settings(max_examples=25)
def test_all_stages_and_replicas_equal_one_reference(pool, scenario, data):
    """Members of a family differ only in stage and number of replicas.

    Each equals one reference without stages, in all state after every step, so all are equal.
    """
    order = scenario.world.order if scenario.world.order in POSITION_FREE else "linear"
    ranks = scenario.world.size // (scenario.topology.tp * scenario.topology.pp)
    shared_by = ranks // scenario.topology.ep
    copies = data.draw(st.sampled_from(divisors(shared_by)))
    system = replace(scenario.system, overlap_params=None, partition="padded", redundancy=1)
    system = replace(system, sum_by="reduce-scatter", gather_after_step=False)
    # Stage 3 reshards the params of a block that is recomputed.
    system = replace(system, checkpoints="none", offload_checkpoints=False)
    system = replace(
        system, reduce_buffer_elems=None, contiguous_grads=True, gather_chunk_elems=None
    )
    plain = replace(system, prefetch=None, reshard_after_forward=True)
    family = [
        replace(plain, stage=0),
        replace(plain, stage=data.draw(st.sampled_from([1, 2, 3])), sum_by="all-reduce"),
        replace(plain, stage=3, gather_after_step=True),
        replace(plain, stage=data.draw(st.sampled_from([0, 1, 2, 3])), sum_by="first-rank"),
        replace(plain, stage=1, redundancy=copies),
        replace(plain, stage=2, redundancy=copies, partition=_partition(plain)),
        replace(plain, stage=3, redundancy=copies, prefetch=data.draw(st.integers(0, 3))),
        replace(plain, stage=3, redundancy=copies, reshard_after_forward=False),
    ]
    family += _through_buffers(plain, data)
    world = replace(scenario.world, order=order)
    for member in family:
        own = replace(world, order="linear") if member.sum_by == "first-rank" else world
        # At stage 3 a rank without a first micro-batch cannot take part in the gathers.
        case = repaired(replace(scenario, world=own, system=member))
        # Some divisors are unknown before the first of several sums.
        if member.sync == scenario.system.sync or not check_scenario(case):
            assert_not_wrong(case, pool)


def _through_buffers(plain, data):
    """Draw DeepSpeed's buffers at stages 1 and 2: their number, time of copies and chunks."""
    elems, chunk = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    partition = "uneven" if plain.align_elems == plain.align_bytes == 1 else "padded"
    buffered = replace(plain, bucket_elems=None, reduce_buffer_elems=elems, partition=partition)
    return [
        replace(buffered, stage=1, overlap_grads=data.draw(st.booleans())),
        replace(buffered, stage=1, sum_by="all-reduce", gather_chunk_elems=chunk),
        replace(buffered, stage=2, sync="every", overlap_grads=data.draw(st.booleans())),
        replace(buffered, stage=2, sync="every", contiguous_grads=False, gather_chunk_elems=chunk),
    ]


def _partition(system):
    return "one-owner" if system.align_elems == system.align_bytes == 1 else "padded"
