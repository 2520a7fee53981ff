"""Deadlines of reductions and gathers, derived from closed forms."""

import pytest

from zero_sim.cost.forms import ParamSize
from zero_sim.cost.hook_trace import HookEvent, HookTrace
from zero_sim.cost.overlap import check_overlap
from zero_sim.mutants import find_mutants
from zero_sim.scenario.spec import (
    FreezeSpec,
    ModelSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.sim import CollectiveRecord, EventLog
from zero_sim.targets import StepResult

SIZES = [
    ParamSize(
        name=name, kind="dense", dtype="torch.float32", elems=elems, param_bytes=4, grad_bytes=4
    )
    for name, elems in (("a", 4), ("b", 4), ("c", 2))
]
"""Buckets of 4 elements contain one param each."""


class Story:
    """A rank's log and hook trace, written event by event."""

    def __init__(self, *, group_size=2):
        self.group_size = group_size
        self.log = EventLog()
        self.hook_trace = HookTrace(lambda: len(self.log.moments))
        self.hook_trace.before_micro_batch(0, 0)

    def issue(self, kind, elems, *, dtype="float32"):
        size = self.group_size if kind == "reduce_scatter" else 2
        group = tuple(range(size))
        record = CollectiveRecord(
            0, kind, "world", group, 0, dtype, elems, 4, "SUM", True, "f.py", 1
        )
        self.log.add(record)
        self.log.note(0, "issue", len(self.log.collectives) - 1)
        return len(self.log.collectives) - 1

    def wait(self, record):
        self.log.note(0, "wait", record)

    def arrive(self, name):
        self.hook_trace._arrive(frozenset({name}), None)

    def begin(self, step, *names):
        event = HookEvent(names=frozenset(names), time=self.hook_trace.clock())
        self.hook_trace.begins.setdefault(step, []).append(event)

    def found(self, **parts):
        if 0 not in self.hook_trace.ends:
            self.hook_trace.after_step(0, [], StepResult())
        scenario = Scenario(
            schema=1,
            model=parts.pop("model", ModelSpec(name="mlp")),
            world=WorldSpec(size=2),
            system=SystemSpec(bucket_elems=4, **parts),
        )
        return [
            finding.message
            for finding in check_overlap(
                self.log,
                {0: self.hook_trace},
                world_ranks=range(8),
                sizes={0: SIZES},
                scenario=scenario,
            )
        ]


def grads(**parts):
    return {"overlap_grads": True, "overlap_params": False, **parts}


def test_bucket_is_due_once_its_gradients_have_arrived():
    story = Story()
    story.arrive("c")
    story.arrive("b")
    (message,) = story.found(**grads())
    assert message == (
        "reduce_scatter of 2 elements on 2 ranks, which reduces the bucket of c, was due in "
        "micro-batch 0, but not issued before the next gradient arrived, that of b"
    )


def test_reductions_in_flight_pass():
    story = Story()
    story.arrive("c")
    story.issue("reduce_scatter", 2)
    story.arrive("b")
    story.issue("reduce_scatter", 4)
    story.arrive("a")
    assert not story.found(**grads())


def test_bucket_waits_for_earlier_buckets():
    story = Story()
    for name in ("a", "b", "c"):
        story.arrive(name)
    assert not story.found(**grads())


def test_incomplete_bucket_is_never_due():
    story = Story()
    story.arrive("b")
    story.arrive("a")
    assert not story.found(**grads())


def test_frozen_param_does_not_delay_its_bucket():
    story = Story()
    story.arrive("b")
    story.arrive("a")
    model = ModelSpec(name="mlp", freeze=(FreezeSpec(param="c", start=0, stop=1),))
    (message,) = story.found(**grads(model=model))
    assert "the bucket of c, was due" in message
    assert message.endswith("that of b")


def test_wait_for_a_reduction_in_backward_is_found():
    story = Story()
    story.arrive("c")
    story.wait(story.issue("reduce_scatter", 2))
    story.arrive("b")
    story.issue("reduce_scatter", 4)
    story.arrive("a")
    (message,) = story.found(**grads())
    assert "1 reductions were waited for before the last gradient" in message


@pytest.mark.parametrize(
    ("divide_by", "dtype", "late"),
    [("tokens", "int64", 0), ("tokens", "float32", 1), ("ranks", "float32", 1)],
)
def test_wait_for_the_token_count_is_accepted(divide_by, dtype, late):
    """The count has as many elements as a bucket's sum."""
    story = Story()
    story.wait(story.issue("all_reduce", 1, dtype=dtype))
    story.arrive("c")
    for name, elems in (("b", 2), ("a", 4)):
        story.issue("all_reduce", elems)
        story.arrive(name)
    sizes = [*SIZES[:2]]
    sizes.append(ParamSize(name="d", kind="dense", dtype="x", elems=1, param_bytes=4, grad_bytes=4))
    scenario = Scenario(
        schema=1,
        model=ModelSpec(name="mlp", freeze=(FreezeSpec(param="d", start=0, stop=1),)),
        world=WorldSpec(size=2),
        system=SystemSpec(stage=0, bucket_elems=4, overlap_grads=True, divide_by=divide_by),
    )
    story.hook_trace.after_step(0, [], StepResult())
    found = check_overlap(
        story.log, {0: story.hook_trace}, world_ranks=range(8), sizes={0: sizes}, scenario=scenario
    )
    assert sum("waited for" in finding.message for finding in found) == late


def gathered(story):
    story.arrive("a")
    records = [story.issue("all_gather", elems) for elems in (2, 2, 1)]
    story.hook_trace.after_step(0, [], StepResult())
    return records


def test_wait_at_the_reading_forward_is_accepted():
    story = Story()
    first, second, third = gathered(story)
    for record, name in ((first, "a"), (second, "b"), (third, "c")):
        story.begin(1, name)
        story.wait(record)
    assert not story.found(overlap_grads=False, overlap_params=True)


def test_wait_for_a_gather_in_the_step_is_found():
    story = Story()
    story.arrive("a")
    story.wait(story.issue("all_gather", 2))
    story.hook_trace.after_step(0, [], StepResult())
    (message,) = story.found(overlap_grads=False, overlap_params=True)
    assert "1 of 1 gathers were waited for before the step of the optimizer returned" in message


def test_wait_for_more_than_a_forward_reads_is_found():
    story = Story()
    records = gathered(story)
    story.begin(1, "a")
    for record in records:
        story.wait(record)
    story.begin(1, "b")
    (message,) = story.found(overlap_grads=False, overlap_params=True)
    assert "3 of 3 gathers were waited for before the forward that reads b began" in message
    assert "needed only 1" in message


def test_wait_before_no_read_is_accepted():
    story = Story()
    story.hook_trace.unguarded = frozenset({"a"})
    story.arrive("a")
    story.wait(story.issue("all_gather", 2))
    story.hook_trace.after_step(0, [], StepResult())
    assert not story.found(overlap_grads=False, overlap_params=True)


def copied(story, *, together):
    for name in ("c", "b", "a"):
        story.arrive(name)
        story.issue("reduce_scatter", 2 if name == "c" else 4)
    story.arrive("a")
    records = [story.issue("all_reduce", elems) for elems in (2, 4)]
    if not together:
        story.wait(records[0])
    story.issue("all_reduce", 4)
    story.hook_trace.after_step(0, [], StepResult())
    return story.found(**grads(redundancy=2))


def test_wait_between_sums_over_replicas_is_found():
    (message,) = copied(Story(group_size=1), together=False)
    assert "1 of 3 sums over replicas of the shards were waited for" in message
    assert not copied(Story(group_size=1), together=True)


FROZEN = ModelSpec(name="mlp", freeze=(FreezeSpec(param="0.down.bias", start=0, stop=2),))


@pytest.mark.parametrize("id", ["M115", "V01", "V10", "V11", "V12", "V13", "V14"])
def test_late_or_blocking_pipeline_is_found(judged, id):
    copies = 2 if id == "V14" else 1
    system = SystemSpec(bucket_elems=1, overlap_grads=True, overlap_params=True, redundancy=copies)
    parts = {"system": system, "run": RunSpec(steps=2), "model": FROZEN, "world": WorldSpec(size=2)}
    assert judged(**parts).verdict == "pass"
    (mutant,) = find_mutants([id])
    with mutant.apply():
        (found,) = judged(**parts).findings
    assert found.check == "invariant.overlap"
