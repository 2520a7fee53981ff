"""Every planned fault is found by the right check, or reported as unnoticed."""

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
    """Run a case of three ranks with one fault; the next case must pass."""

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


def test_crash_is_reported_as_planned(struck):
    result = struck("crash", collective="reduce_scatter")
    (finding,) = result.findings
    assert (result.verdict, finding.check, finding.rank) == ("fail", "world.rank-failed", 1)
    assert "InjectedCrash: crashed by plan at its 1st reduce_scatter call" in finding.message


def test_stall_is_named(struck):
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
def test_changed_data_is_found(struck, kind, said, collective, check, phase, overlap):
    system = SystemSpec(bucket_elems=60, overlap_grads=overlap, overlap_params=overlap)
    result = struck(kind, collective=collective, system=system, **said)
    assert result.verdict == "fail"
    finding = result.findings[0]
    assert (finding.check, finding.phase, finding.step) == (check, phase, 0)
    assert any(f"planned fault: {kind} of rank 1" in note for note in result.notes)


@pytest.mark.parametrize("kind", ["drop", "duplicate"])
def test_fault_in_the_sum_over_replicas_is_found(struck, kind):
    result = struck(
        kind, collective="all_reduce", world=WorldSpec(size=4), system=SystemSpec(redundancy=2)
    )
    assert only(result)[0] == "equality.grad"
    assert {finding.rank for finding in result.findings if finding.check == "equality.grad"} == {1}


def test_finding_has_the_step_of_the_fault(struck):
    result = struck("drop", collective="reduce_scatter", call=1)
    assert result.findings[0].step == 1


def test_bit_of_padding_is_found(struck):
    result = struck(
        "corrupt",
        collective="reduce_scatter",
        element=454,
        bit=14,
        system=SystemSpec(align_elems=8),
    )
    assert only(result) == ["invariant.padding"]


def test_fault_in_one_group_spares_the_others(struck):
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


def test_slow_rank_passes_with_a_note(struck):
    result = struck("slow")
    assert (result.verdict, only(result)) == ("pass", [])
    assert any("slow of rank 1" in note for note in result.notes)


def test_slow_rank_does_not_hide_a_fault(judged, monkeypatch):
    monkeypatch.setattr(unit_module, "all_gather", lambda *args, **kwargs: None)
    result = judged(faults=(FaultSpec(kind="slow", rank=1),))
    assert (result.verdict, only(result)[0]) == ("fail", "equality.params")


def test_unnoticed_fault_is_inconclusive(struck):
    # Without loss scaling, the number of overflowed gradients is not read.
    result = struck("corrupt", collective="all_reduce", element=2, bit=0)
    assert (result.verdict, only(result)) == ("inconclusive", ["guard.fault-unnoticed"])
    assert "bit 0 of element 2 that it sends: 0.0 -> 5e-324" in result.findings[0].message


def test_loss_scaling_notices_the_same_fault(struck):
    from zero_sim.scenario.spec import LossScaleSpec

    result = struck(
        "corrupt",
        collective="all_reduce",
        element=2,
        bit=0,
        optimizer=OptimizerSpec(loss_scale=LossScaleSpec(initial=8.0)),
    )
    assert "equality.skipped" in only(result)


def test_fault_that_never_happens_is_inconclusive(struck):
    result = struck("drop", call=1000)
    assert (result.verdict, only(result)) == ("inconclusive", ["guard.fault-not-reached"])
    assert "made 7 collective calls" in result.findings[0].message


def test_random_fault_is_reproducible(judged):
    fault = FaultSpec(kind="corrupt", rank=2, at="random", call=1, call_stop=6)
    first, second = (judged(faults=(fault,)) for _ in range(2))
    assert first.log_digest == second.log_digest
    assert first.findings == second.findings


class TestExpectedFindings:
    """`expect.finding`: the case passes if the finding occurs."""

    DROP = (FaultSpec(kind="drop", rank=1, collective="reduce_scatter"),)

    @pytest.mark.parametrize("wanted", ["equality.grad", "equality.master", "equality"])
    def test_expected_finding_passes_with_a_note(self, judged, wanted):
        result = judged(faults=self.DROP, expect=ExpectSpec(finding=wanted))
        assert (result.verdict, result.findings) == ("pass", ())
        (first, *_) = result.notes
        assert first.startswith(f"found, as expected: {wanted}")
        assert "step 0, rank 0" in first

    @pytest.mark.parametrize("wanted", ["equality.params", "equal", "world"])
    def test_other_finding_fails_and_is_kept(self, judged, wanted):
        faults = (FaultSpec(kind="drop", rank=1, collective="all_gather"),)
        wanted = "equality.grad" if wanted == "equality.params" else wanted
        result = judged(faults=faults, expect=ExpectSpec(finding=wanted))
        assert result.verdict == "fail"
        assert only(result) == ["expect.finding", "equality.params"]
        assert f"expected a finding of {wanted}, got equality.params only" in (
            result.findings[0].message
        )

    def test_no_finding_fails(self, judged):
        result = judged(expect=ExpectSpec(finding="equality"))
        assert (result.verdict, only(result)) == ("fail", ["expect.finding"])
        assert "got nothing" in result.findings[0].message

    def test_finding_before_the_fault_fails(self, judged, monkeypatch):
        monkeypatch.setattr(unit_module, "all_gather", lambda *args, **kwargs: None)
        faults = (FaultSpec(kind="drop", rank=1, call=1000),)
        result = judged(faults=faults, expect=ExpectSpec(finding="equality.params"))
        assert result.verdict == "fail"
        assert "before any planned fault happened" in result.findings[0].message

    def test_guard_may_be_expected(self, judged):
        faults = (FaultSpec(kind="drop", rank=1, call=1000),)
        result = judged(faults=faults, expect=ExpectSpec(finding="guard.fault-not-reached"))
        assert result.verdict == "pass"

    def test_error_is_not_the_expected_finding(self, judged):
        result = judged(
            model=ModelSpec(name="params", shapes=()), expect=ExpectSpec(finding="equality")
        )
        assert result.verdict == "error"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_scenarios_have_their_expected_findings(path, pool):
    for case in load_cases(path):
        result = run_case(case, pool=pool)
        assert result.verdict == "pass", (case.name, result.findings)
