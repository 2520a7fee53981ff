"""Order of findings: a cause comes before its effects."""

import itertools
from collections import Counter

import pytest

from zero_sim.findings.buffer_map import build_buffer_map
from zero_sim.findings.dataflow import earliest_first, of_first_step, sort_and_merge
from zero_sim.findings.records import Finding
from zero_sim.judge.judge_report import JudgeReport
from zero_sim.judge.verdict import Observations, reach_verdict
from zero_sim.scenario.spec import ModelSpec, RunSpec, Scenario, TopologySpec, WorldSpec
from zero_sim.targets import Place

PHASE_OF = {
    "equality.loss": "forward",
    "equality.grad": "reduce",
    "equality.norm": "norm",
    "equality.skipped": "norm",
    "equality.state": "optimizer",
    "equality.master": "optimizer",
    "equality.params": "gather",
}


def finding(check, *, step=0, rank=0, **more):
    return Finding(
        check=check, message="differs", step=step, phase=PHASE_OF[check], rank=rank, **more
    )


def seen_with(*found):
    """Return the report of a judge with these findings."""
    return JudgeReport(
        world_ranks=(0,), first_step=0, has_started=True, compared_elems=1,
        nonzero_fraction_max=1.0, same_data=False, has_stepped=True, uncertified_step=None,
        unobserved=frozenset(), guarantees=Counter(), bad_step=found[0].step, findings=found,
    )  # fmt: skip


@pytest.mark.parametrize(("cause", "effect"), list(itertools.pairwise(PHASE_OF)))
def test_cause_comes_before_its_effect_on_any_rank(cause, effect):
    found = [finding(effect, rank=0), finding(cause, rank=3)]
    assert [each.check for each in earliest_first(found)] == [cause, effect]


def test_earlier_step_comes_before_earlier_phase():
    found = [finding("equality.loss", step=1), finding("equality.params", step=0)]
    assert [each.step for each in earliest_first(found)] == [0, 1]


def test_findings_of_one_check_keep_the_first_rank_and_are_counted():
    (kept,) = sort_and_merge([finding("equality.grad", rank=2), finding("equality.grad", rank=1)])
    assert kept.rank == 1
    assert kept.detail.startswith("2 such differences in this step:")


def test_finding_without_a_step_belongs_to_every_step():
    nowhere = Finding(check="invariant.ownership", message="no rank")
    found = [finding("equality.loss", step=4), nowhere, finding("equality.norm", step=3)]
    assert of_first_step(found) == [nowhere, found[2]]


def test_gradient_of_one_cell_comes_before_the_shared_norm():
    """Two cells share a norm: the first one sees only the norm, the second one the cause."""
    scenario = Scenario(
        schema=1, name="case", model=ModelSpec(name="mlp", hidden=2), world=WorldSpec(size=2),
        topology=TopologySpec(tp=2), run=RunSpec(steps=1),
    )  # fmt: skip
    found = [finding("equality.norm", rank=0)], [finding("equality.grad", rank=1, step=0)]
    result = reach_verdict(scenario, Observations(judged=[seen_with(*each) for each in found]))
    assert [each.check for each in result.findings] == ["equality.grad", "equality.norm"]


def test_earlier_step_of_one_cell_comes_before_a_later_one_of_another():
    scenario = Scenario(
        schema=1, model=ModelSpec(name="mlp"), world=WorldSpec(size=2), run=RunSpec(steps=1)
    )
    found = finding("equality.loss", step=1), finding("equality.params", step=0, rank=1)
    result = reach_verdict(scenario, Observations(judged=[seen_with(each) for each in found]))
    assert [each.check for each in result.findings] == ["equality.params"]


def test_params_without_a_rank_are_listed_once():
    alike = [finding("equality.grad", rank=None, param=name) for name in ("a", "a", "b")]
    (merged,) = sort_and_merge(alike)
    assert merged.detail.splitlines()[1:] == ["  param 'a'", "  param 'b'"]


@pytest.mark.parametrize("mapped", [0, 1])
def test_finding_of_one_cell_never_maps_the_buffer_of_another(mapped):
    scenario = Scenario(schema=1, name="case", model=ModelSpec(name="mlp"), run=RunSpec(steps=1))
    differ = {"param": "w", "differ_spans": ((0, 1),)}
    found = [finding("equality.grad", rank=rank, **differ) for rank in (0, 1)]
    shard = {"bucket": 0, "shard": 0, "shard_start": 0, "shard_stop": 4}
    places = {0: [Place(param="w", start=0, stop=4, flat_start=0, **shard)]}
    maps = [None, None]
    maps[mapped] = build_buffer_map(found[mapped], found=[found[mapped]], places=places)
    seen = Observations(judged=[seen_with(each) for each in found], buffer_maps=maps)
    assert reach_verdict(scenario, seen).strip == maps[0]
