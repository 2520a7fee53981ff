"""Every kind of planned fault is noticed by the right check, or told as unnoticed."""

from pathlib import Path

import pytest

from zero_sim import run_case
from zero_sim.scenario.load import load_cases
from zero_sim.scenario.spec import (
    ExpectSpec,
    FaultSpec,
    ModelSpec,
    OptimizerSpec,
    SystemSpec,
    TopologySpec,
    WorldSpec,
)
from zero_sim.zero import unit as unit_module

FOLDER = Path(__file__).parents[2] / "scenarios" / "faults"


def only(result):
    return [finding.check for finding in result.findings]


@pytest.fixture
def struck(judged):
    """Run a case of three ranks with one fault; the case after it must pass."""

    def run(kind, *, rank=1, **parts):
        said = {
            name: parts.pop(name)
            for name in ("collective", "call", "side", "element", "bit", "at", "call_stop")
            if name in parts
        }
        result = judged(faults=(FaultSpec(kind=kind, rank=rank, **said),), **parts)
        assert judged().verdict == "pass"
        return result

    return run


def test_a_crash_says_that_it_was_planned(struck):
    result = struck("crash", collective="reduce_scatter")
    (finding,) = result.findings
    assert (result.verdict, finding.check, finding.rank) == ("fail", "world.rank-failed", 1)
    assert "InjectedCrash: crashed by plan at its 1st reduce_scatter call" in finding.message


def test_a_stall_is_named(struck):
    result = struck("stall", collective="all_gather", call=1)
    (finding,) = result.findings
    assert (result.verdict, finding.check) == ("fail", "world.stalled-by-plan")
    assert "ranks that never came: 1" in finding.message
    assert "rank 1: stalled by plan at its 2nd all_gather call" in finding.detail


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("corrupt", {"element": 1, "bit": 14}),
        ("corrupt", {"element": 1, "bit": 14, "side": "receive"}),
        ("drop", {}),
        ("duplicate", {}),
    ],
)
@pytest.mark.parametrize(
    ("collective", "check", "phase"),
    [("reduce_scatter", "equality.grad", "reduce"), ("all_gather", "equality.params", "gather")],
)
def test_data_that_is_changed(struck, kind, said, collective, check, phase, overlap):
    system = SystemSpec(bucket_elems=60, overlap_grads=overlap, overlap_params=overlap)
    result = struck(kind, collective=collective, system=system, **said)
    assert result.verdict == "fail"
    finding = result.findings[0]
    assert (finding.check, finding.phase, finding.step) == (check, phase, 0)
    assert any(f"planned fault: {kind} of rank 1" in note for note in result.notes)


@pytest.mark.parametrize("kind", ["drop", "duplicate"])
def test_the_second_sum_with_copies(struck, kind):
    result = struck(
        kind, collective="all_reduce", world=WorldSpec(size=4), system=SystemSpec(redundancy=2)
    )
    assert only(result)[0] == "equality.grad"
    assert {finding.rank for finding in result.findings if finding.check == "equality.grad"} == {1}


def test_the_step_is_the_one_in_which_it_happened(struck):
    result = struck("drop", collective="reduce_scatter", call=1)
    assert result.findings[0].step == 1


def test_a_bit_of_padding(struck):
    result = struck(
        "corrupt",
        collective="reduce_scatter",
        element=454,
        bit=14,
        system=SystemSpec(align_elems=8),
    )
    assert only(result) == ["invariant.padding"]


def test_a_cell_is_struck_alone(struck):
    result = struck(
        "drop",
        rank=2,
        collective="reduce_scatter",
        world=WorldSpec(size=4),
        topology=TopologySpec(tp=2),
    )
    assert result.verdict == "fail"
    summed = {found.rank for found in result.findings if found.check == "equality.grad"}
    assert summed
    assert summed <= {0, 2}


def test_a_slow_rank_owes_agreement_and_passes_with_a_note(struck):
    result = struck("slow")
    assert (result.verdict, only(result)) == ("pass", [])
    assert any("slow of rank 1" in note for note in result.notes)


def test_a_slow_rank_does_not_hide_what_is_wrong(judged, monkeypatch):
    monkeypatch.setattr(unit_module, "all_gather", lambda *args, **kwargs: None)
    result = judged(faults=(FaultSpec(kind="slow", rank=1),))
    assert (result.verdict, only(result)[0]) == ("fail", "equality.params")


def test_a_fault_that_nobody_notices_is_no_pass(struck):
    # Without loss scaling nobody reads how many gradients overflowed.
    result = struck("corrupt", collective="all_reduce", element=2, bit=0)
    assert (result.verdict, only(result)) == ("inconclusive", ["guard.fault-unnoticed"])
    assert "bit 0 of element 2 that it sends: 0.0 -> 5e-324" in result.findings[0].message


def test_with_loss_scaling_the_same_fault_is_seen(struck):
    from zero_sim.scenario.spec import LossScaleSpec

    result = struck(
        "corrupt",
        collective="all_reduce",
        element=2,
        bit=0,
        optimizer=OptimizerSpec(loss_scale=LossScaleSpec(initial=8.0)),
    )
    assert "equality.skipped" in only(result)


def test_a_fault_that_never_happened_is_no_pass(struck):
    result = struck("drop", call=1000)
    assert (result.verdict, only(result)) == ("inconclusive", ["guard.fault-not-reached"])
    assert "made 7 collective calls" in result.findings[0].message


def test_two_runs_with_a_drawn_fault_are_one(judged):
    fault = FaultSpec(kind="corrupt", rank=2, at="random", call=1, call_stop=6)
    first, second = (judged(faults=(fault,)) for _ in range(2))
    assert first.log_digest == second.log_digest
    assert first.findings == second.findings


class TestExpectedFindings:
    """`expect.finding`: a case that passes because something is found."""

    DROP = (FaultSpec(kind="drop", rank=1, collective="reduce_scatter"),)

    @pytest.mark.parametrize("wanted", ["equality.grad", "equality.master", "equality"])
    def test_found_is_a_pass_that_says_what(self, judged, wanted):
        result = judged(faults=self.DROP, expect=ExpectSpec(finding=wanted))
        assert (result.verdict, result.findings) == ("pass", ())
        (first, *_) = result.notes
        assert first.startswith(f"found, as expected: {wanted}")
        assert "step 0, rank 0" in first

    @pytest.mark.parametrize("wanted", ["equality.params", "equal", "world"])
    def test_something_else_is_a_failure_that_keeps_it(self, judged, wanted):
        faults = (FaultSpec(kind="drop", rank=1, collective="all_gather"),)
        wanted = "equality.grad" if wanted == "equality.params" else wanted
        result = judged(faults=faults, expect=ExpectSpec(finding=wanted))
        assert result.verdict == "fail"
        assert only(result) == ["expect.finding", "equality.params"]
        assert f"expected a finding of {wanted}, got equality.params only" in (
            result.findings[0].message
        )

    def test_nothing_is_a_failure(self, judged):
        result = judged(expect=ExpectSpec(finding="equality"))
        assert (result.verdict, only(result)) == ("fail", ["expect.finding"])
        assert "got nothing" in result.findings[0].message

    def test_a_broken_system_does_not_stand_in_for_the_fault(self, judged, monkeypatch):
        monkeypatch.setattr(unit_module, "all_gather", lambda *args, **kwargs: None)
        faults = (FaultSpec(kind="drop", rank=1, call=1000),)
        result = judged(faults=faults, expect=ExpectSpec(finding="equality.params"))
        assert result.verdict == "fail"
        assert "before any planned fault happened" in result.findings[0].message

    def test_a_guard_can_be_what_is_expected(self, judged):
        faults = (FaultSpec(kind="drop", rank=1, call=1000),)
        result = judged(faults=faults, expect=ExpectSpec(finding="guard.fault-not-reached"))
        assert result.verdict == "pass"

    def test_an_error_is_none(self, judged):
        result = judged(
            model=ModelSpec(name="params", shapes=()), expect=ExpectSpec(finding="equality")
        )
        assert result.verdict == "error"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_the_shipped_scenarios_find_what_they_say(path, pool):
    for case in load_cases(path):
        result = run_case(case, pool=pool)
        assert result.verdict == "pass", (case.name, result.findings)
