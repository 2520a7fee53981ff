"""Parts of a target's declared costs, each declared and checked separately."""

import pytest

from zero_sim import run_case
from zero_sim.backends.worlds import WorldPool
from zero_sim.errors import UsageError
from zero_sim.mutants import find_mutants
from zero_sim.scenario.spec import (
    ModelSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    TopologySpec,
    WorldSpec,
)
from zero_sim.targets import Costs
from zero_sim.targets.own import ZeroSimTarget

PLAIN = SystemSpec(bucket_elems=1000)


class Target(ZeroSimTarget):
    def __init__(self, **costs):
        self.costs = Costs(**costs)


@pytest.fixture(scope="module")
def pool():
    with WorldPool() as worlds:
        yield worlds


def judged(pool, target, mutant=None, system=PLAIN, **parts):
    fields = {
        "schema": 1, "name": "case", "model": ModelSpec(name="mlp", hidden=32, dtype="bf16"),
        "world": WorldSpec(size=2), "system": system, "run": RunSpec(steps=2),
    }  # fmt: skip
    scenario = Scenario(**(fields | parts))
    if mutant is None:
        return run_case(scenario, pool=pool, target=target)
    (found,) = find_mutants([mutant])
    with found.apply() as patches:
        result = run_case(scenario, pool=pool, target=target)
    assert patches.armed
    return result


def only(result):
    (finding,) = result.findings
    return finding


ALONE = [
    ({"volume": "textbook"}, "V15", "invariant.volume"),
    ({"calls": "textbook"}, "M111", "invariant.volume"),
    ({"calls": "reported-buckets"}, "M111", "invariant.volume"),
    ({"held": "textbook"}, "V02", "invariant.memory"),
    ({"in_flight": "textbook"}, "M115", "invariant.overlap"),
]


@pytest.mark.parametrize(("costs", "mutant", "check"), ALONE)
def test_each_part_finds_its_own_fault(pool, costs, mutant, check):
    system = SystemSpec(bucket_elems=1000, overlap_grads=mutant == "M115")
    assert judged(pool, Target(**costs), system=system).verdict == "pass"
    assert only(judged(pool, Target(**costs), mutant, system=system)).check == check


@pytest.mark.parametrize(("costs", "mutant"), [
    ({"volume": "textbook", "calls": "textbook", "in_flight": "textbook"}, "V02"),
    ({"volume": "textbook", "calls": "textbook", "held": "textbook"}, "M115"),
    ({"held": "textbook", "volume": "textbook"}, "V07"),
])  # fmt: skip
def test_undeclared_parts_are_not_checked(pool, costs, mutant):
    system = SystemSpec(bucket_elems=1000, overlap_grads=mutant == "M115")
    assert judged(pool, Target(**costs), mutant, system=system).verdict == "pass"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_own_system_passes_with_reported_buckets(pool, stage, size):
    system = SystemSpec(stage=stage, bucket_elems=1000)
    result = judged(
        pool, Target(calls="reported-buckets"), system=system, world=WorldSpec(size=size),
        run=RunSpec(steps=2, micro_batches=2),
    )  # fmt: skip
    assert (result.verdict, result.findings) == ("pass", ())


COPIES = [
    {"redundancy": 2},
    {"redundancy": 4},
    {"redundancy": 2, "sync": "every"},
]


@pytest.mark.parametrize("copies", COPIES, ids=str)
def test_sums_over_replicas_are_not_double_reductions(pool, copies):
    system = SystemSpec(bucket_elems=1000, **copies)
    run = {"world": WorldSpec(size=4), "run": RunSpec(steps=2, micro_batches=2)}
    result = judged(pool, Target(calls="reported-buckets"), system=system, **run)
    assert (result.verdict, result.findings) == ("pass", ())


def test_all_reduced_bucket_is_found_with_replicas(pool):
    """The sum over replicas has as many ranks as the sum in a shard group."""
    system = SystemSpec(bucket_elems=1000, redundancy=2)
    target = Target(calls="reported-buckets")
    said = only(judged(pool, target, "M111", system=system, world=WorldSpec(size=4))).message
    assert "1 x reduce_scatter of" in said


@pytest.mark.parametrize("redundancy", [1, 2])
def test_expert_buckets_are_reduced_by_their_groups(pool, redundancy):
    result = judged(
        pool, Target(calls="reported-buckets"), system=SystemSpec(redundancy=redundancy),
        model=ModelSpec(name="moe", hidden=6), world=WorldSpec(size=8),
        topology=TopologySpec(ep=2),
    )  # fmt: skip
    assert (result.verdict, result.findings) == ("pass", ())


def test_tensor_parallel_sums_are_not_buckets(pool):
    """As many ranks have parts of a layer as share a part."""
    result = judged(
        pool, Target(calls="reported-buckets"), world=WorldSpec(size=4),
        model=ModelSpec(name="tp-block", hidden=16), topology=TopologySpec(tp=2),
    )  # fmt: skip
    assert (result.verdict, result.findings) == ("pass", ())


def test_all_reduced_bucket_is_found(pool):
    said = only(judged(pool, Target(calls="reported-buckets"), "M111")).message
    assert "1 x all_reduce of" in said
    assert "1 x reduce_scatter of" in said


def test_ignored_bucket_size_is_found(pool):
    class Follows(Target):
        from zero_sim.targets import EVERYTHING as capabilities

    many = SystemSpec(bucket_elems=100_000)
    assert judged(pool, Follows(calls="reported-buckets"), system=many).verdict == "pass"
    said = only(judged(pool, Follows(calls="reported-buckets"), "V05", system=many)).message
    assert "expected at most" in said
    assert "with bucket_elems = 100000" in said


def volume(case):
    padded = sum(case.elems.values())
    # Scattered as a whole in bf16, and half of it gathered; the norm is three numbers.
    return {"bfloat16": 2 * padded + padded}


def test_own_form_of_volume_is_checked(pool):
    system = SystemSpec()
    model = ModelSpec(name="params", shapes=((40, 100),), dtype="bf16")
    assert judged(pool, Target(volume=volume), system=system, model=model).verdict == "pass"
    said = only(judged(pool, Target(volume=volume), "V03", system=system, model=model)).message
    assert "16000 of bfloat16 in place of 12000" in said


def held(case):
    return {"masters": 4 * sum(case.elems.values()) // case.scenario.world.size}


def test_own_form_of_held_bytes_is_checked(pool):
    model = ModelSpec(name="params", shapes=((40, 100),), dtype="bf16")
    assert judged(pool, Target(held=held), model=model).verdict == "pass"
    less = Target(held=lambda case: {"masters": 4})
    said = only(judged(pool, less, model=model)).message
    assert "holds 8000 bytes of masters after the step, expected 4" in said


def test_bytes_in_flight_are_limited(pool):
    system = SystemSpec(bucket_elems=1000, overlap_grads=True)
    largest = Target(in_flight=lambda case: 100_000)
    assert judged(pool, largest, system=system).verdict == "pass"
    least = Target(in_flight=lambda case: 10)
    found = only(judged(pool, least, system=system))
    assert found.check == "invariant.overlap"
    assert "bytes in flight when it issues" in found.message


def test_invalid_declaration_is_refused():
    with pytest.raises(UsageError, match=r"Costs.calls to be 'textbook' or 'reported-buckets'"):
        Costs(calls="all")
    with pytest.raises(UsageError, match=r"Costs.gathers to be an integer at least 0"):
        Costs(gathers=-1)


def test_form_without_integers_is_an_error_of_the_target(pool):
    for name in ("volume", "held"):
        result = judged(pool, Target(**{name: lambda case: {"float32": "much"}}))
        assert result.verdict == "error"
        said = f"expected Costs.{name} to return a mapping of names to integers"
        assert said in result.error
