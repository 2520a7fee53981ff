"""Ledgers of runs, equal to closed forms."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.run.summing import Engine
from zero_sim.calculators.counted import counted_model
from zero_sim.calculators.footprint import footprint_of
from zero_sim.calculators.measure import check_fits, measure
from zero_sim.calculators.models import case_of
from zero_sim.calculators.network import Network
from zero_sim.calculators.traffic import traffic_of
from zero_sim.errors import EnvironmentProblem
from zero_sim.mutants import find_mutants
from zero_sim.scenario.load import load_cases
from zero_sim.scenario.spec import ModelSpec, RunSpec, Scenario, SystemSpec, TopologySpec, WorldSpec

SCENARIOS = Path(__file__).parents[2] / "scenarios"
PROFILE = Path(__file__).parents[2] / "examples" / "memory"
KINDS = ("params", "gradients", "masters", "exp_avg", "exp_avg_sq")


def case(*, size=4, **system):
    return Scenario(
        schema=1,
        name="case",
        model=ModelSpec(name="mlp", hidden=8, blocks=3, dtype="bf16"),
        world=WorldSpec(size=size),
        system=SystemSpec(**system),
        run=RunSpec(steps=2),
    )


WAYS = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 1, "redundancy": 2, "bucket_elems": 300},
    {"stage": 2, "bucket_elems": 300, "grad_dtype": "fp32"},
    {"stage": 2, "bucket_elems": 300, "sync": "every"},
    {"stage": 3, "bucket_elems": 300},
    {"stage": 3, "bucket_elems": 300, "partition": "uneven", "reshard_after_forward": False},
    {"stage": 3, "redundancy": 2, "bucket_elems": 300},
    {"stage": 2, "bucket_elems": 1, "partition": "one-owner"},
    {"stage": 3, "bucket_elems": 1, "partition": "rows"},
    {"stage": 2, "bucket_elems": 300, "arena": True},
    {"stage": 3, "bucket_elems": 1, "arena": True, "overlap_grads": False, "grad_dtype": "fp32"},
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_run_equals_the_closed_forms(way):
    measured = measure(case(**way))
    assert measured.is_costed
    assert list(measured.differences()) == []


def test_groups_of_equal_size_use_their_own_links():
    """Dense gradients are summed inside a node, those of experts between nodes."""
    experts = replace(
        case(size=4, redundancy=2, sum_by="all-reduce"),
        model=ModelSpec(name="moe", hidden=4),
        topology=TopologySpec(ep=2),
    )
    measured, pairs = measure(experts), Network(ranks_per_node=2)
    for rank in range(4):
        owed = traffic_of(measured.sizes[rank], scenario=experts, rank=rank, network=pairs)
        made = measured.traffic(rank, network=pairs)
        for link in ("nvlink", "nic"):
            assert owed.sent_over(link) == made.sent_over(link)


@pytest.mark.parametrize(
    "name", ["features/fp8", "features/experts", "features/model-parallel", "features/unusual"]
)
def test_shipped_scenarios_equal_the_closed_forms(name):
    """The last case of each runs on all its ranks, in more than a quarter of a second."""
    measured = measure(load_cases(SCENARIOS / f"{name}.toml")[-1])
    assert list(measured.differences()) == []


@pytest.fixture(scope="module")
def stage_3():
    # A bucket is a linear layer of 8 x 32 + 32 or 32 x 8 + 8 elements.
    return measure(case(stage=3, bucket_elems=264))


def test_unsharded_memory_is_within_the_closed_form_of_a_chain(stage_3):
    (group,) = stage_3.groups
    for rank, ledger in enumerate(stage_3.ledgers):
        moments = footprint_of(stage_3.sizes[rank], scenario=group.scenario, rank=rank).moments
        for name in ("gathered", "whole_gradients"):
            owed = max(moment.get(name, 0) for moment in moments.values())
            assert 0 < ledger.peak_of(name).bytes[name] <= owed


def test_gathered_params_are_resident_only_in_use(stage_3):
    samples = stage_3.ledgers[0].samples
    began = next(s for s in samples if s.where == "1.up began")
    over = samples[-1]
    assert began.bytes["gathered"] > 0
    assert "gathered" not in over.bytes
    assert over.phase == "between steps"


@pytest.mark.parametrize(
    ("index", "held", "alone"),
    [(0, 146_979_840, 293_959_680), (1, 587_560_960, 1_175_121_920)],
    ids=["hidden=512", "hidden=1024"],
)
def test_ten_mlp_layers_on_4_ranks_take_half_of_one_device(index, held, alone):
    """The ratio holds between steps and at the peak of a step."""
    ranks, device = (
        measure(load_cases(PROFILE / f"{name}.toml")[index]).ledgers[0]
        for name in ("mlp", "one-device")
    )
    assert sum(ranks.between.get(kind, 0) for kind in KINDS) == held
    assert sum(device.between.get(kind, 0) for kind in KINDS) == alone
    assert f"{ranks.peak.total / device.peak.total:.1%}" == "50.0%"


def test_fp32_gradients_are_resident_during_the_norm():
    measured = measure(case(stage=1))
    ledger = measured.ledgers[0]
    norm = next(s for s in ledger.samples if s.where == "all_reduce of 3 float64")
    footprint = footprint_of(measured.sizes[0], scenario=measured.groups[0].scenario, rank=0)
    assert norm.bytes["staging"] - 3 * 8 == footprint.moments["step"]["staging"]


def test_traffic_of_a_log_equals_the_closed_form(stage_3):
    from zero_sim.calculators.traffic import traffic_of

    network = Network()
    made = stage_3.traffic(0, network=network)
    owed = traffic_of(
        stage_3.sizes[0], scenario=stage_3.groups[0].scenario, rank=0, network=network
    )
    assert made.by_kind() == owed.by_kind()
    assert Counter({f.kind: f.messages for f in made.flows}) == {
        f.kind: f.messages for f in owed.flows
    }


def broken_by(id, scenario):
    (mutant,) = find_mutants([id])
    with mutant.apply() as patches:
        measured = measure(scenario)
    assert patches.armed
    return list(measured.differences())


def test_all_reduce_instead_of_reduce_scatter_is_a_difference():
    told = broken_by("M111", case(stage=1))
    assert any("all_reduce" in each and "too many" in each for each in told)
    assert any("reduce_scatter" in each and "missing" in each for each in told)


def test_unreported_memory_is_listed():
    ddp = replace(case(stage=1), system=SystemSpec(target="torch-ddp", stage=0))
    ddp = replace(ddp, model=replace(ddp.model, dtype="fp32"))
    measured = measure(ddp)
    assert not measured.is_costed
    ledger = measured.ledgers[0]
    assert "gathered" in ledger.unreported
    elems = sum(size.elems for size in measured.sizes[0])
    held = ledger.between
    assert {held[name] for name in ("params", "gradients", "exp_avg", "exp_avg_sq")} == {4 * elems}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_chain_of_counted_params_has_the_peak_of_the_closed_form(stage):
    """Each module has a bucket, so stage 3 gathers two at a time and takes least."""
    model = counted_model(13_400, dtype="bf16")
    model = model.with_choice(ranks=4, stage=stage, bucket_elems=1000)
    with case_of(model) as chain:
        measured = measure(chain)
    assert list(measured.differences()) == []
    footprint = footprint_of(model.laid_out(), scenario=model.scenario, rank=0)
    peak = measured.ledgers[0].peak
    besides = peak.bytes["other"] + 3 * 8  # the number of steps, and the norm's three numbers
    assert peak.total - besides == footprint.peak == 13_400 * (20, 8, 6.5, 5)[stage]


def test_run_that_does_not_fit_is_refused():
    model = counted_model(10**6, dtype="bf16").with_choice(ranks=4, stage=0)
    check_fits(model, available=10**9)
    with pytest.raises(EnvironmentProblem, match=r"expected a run that fits into the 0\.0 GB"):
        check_fits(model, available=10**6)


def test_refusal_names_the_number_of_params_that_fit():
    model = counted_model(10**6, dtype="bf16").with_choice(ranks=4, stage=0)
    # 20 bytes per param with fp32 gradients, on four ranks, with a quarter to spare.
    with pytest.raises(EnvironmentProblem, match="Try about 10,000 params"):
        check_fits(model, available=10**6)


@pytest.mark.parametrize("buffer", [16, 100])
def test_staging_by_ledger_does_not_grow_with_the_model(buffer):
    """Measured at the norm's collective, the peak is the buffer and its three numbers."""

    def staged(blocks, buffer):
        one = case(size=2, step_buffer_elems=buffer)
        deep = replace(one, model=replace(one.model, blocks=blocks, hidden=4))
        measured = measure(deep)
        assert list(measured.differences()) == []
        owed = footprint_of(measured.sizes[0], scenario=deep, rank=0).moments["step"]["staging"]
        return owed, measured.ledgers[0].peak_of("staging").bytes["staging"] - 24

    assert staged(2, buffer) == staged(8, buffer)
    assert staged(8, buffer)[1] == 4 * buffer
    assert staged(8, None)[1] == staged(8, None)[0] > staged(2, None)[0] == staged(2, None)[1]


def test_checkpoints_equal_the_closed_form():
    name, kept = "systems/zero-r-activations", set()
    for scenario in load_cases(SCENARIOS / f"{name}.toml"):
        small = replace(scenario, run=replace(scenario.run, steps=1, micro_batches=1))
        if scenario.topology.tp == 4 and scenario.system.checkpoints != "none":
            measured = measure(small)
            assert list(measured.differences()) == []
            kept.add(measured.ledgers[0].peak_of("checkpoints").bytes["checkpoints"])
    # Two blocks of 3 rows x 4 positions x 8 features in bf16, on one rank or four.
    assert kept == {384, 96}


def test_engine_with_start_step_is_measured():
    """Each step's rows are given before the first forward, as in training."""
    seen = []

    class Counts(Engine):
        def start_step(self, *, rows):
            seen.append(rows)

    class Counting:
        name = "counting"

        def build(self, module, *, scenario, group):
            return Counts(module, scenario, group, averages=True, keeps=False)

    scenario = case(stage=0)
    measure(replace(scenario, model=replace(scenario.model, dtype="fp32")), target=Counting())
    assert seen == [[scenario.data.rows]] * 8
