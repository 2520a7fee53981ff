"""Evidence of a failure in the result: differing tensors and event logs."""

import pytest
import torch

from zero_sim.findings import describe as findings
from zero_sim.findings.records import Finding
from zero_sim.scenario.spec import ModelSpec, RunSpec, WorldSpec
from zero_sim.zero.optimizer import DistributedOptimizer


@pytest.fixture
def broken(monkeypatch):
    right = DistributedOptimizer.step

    def undivided(self):
        with torch.no_grad():
            self.ddp.divisor.fill_(1.0)
        return right(self)

    monkeypatch.setattr(DistributedOptimizer, "step", undivided)


@pytest.mark.usefixtures("broken")
def test_evidence_is_from_the_judged_step(judged):
    result = judged(model=ModelSpec(name="mlp", hidden=5), run=RunSpec(steps=4))
    kept = [finding for finding in result.findings if finding.evidence is not None]
    assert {"equality.master", "equality.state", "equality.params"} <= {f.check for f in kept}
    for finding in kept:
        evidence = finding.evidence
        apart = (evidence.expected != evidence.got).nonzero()
        first = int(apart[0])
        assert evidence.expected[first].item() == float.fromhex(finding.expected)
        assert evidence.got[first].item() == float.fromhex(finding.got)


@pytest.mark.parametrize("first", [0, 100, 5000, 9999])
def test_evidence_is_cut_around_the_first_difference(first):
    expected, got = torch.zeros(100, 100), torch.zeros(100, 100)
    got.view(-1)[first] = 1.0
    evidence = findings.differing(Finding(check="x", message="y"), expected, got).evidence
    assert evidence.expected.numel() == evidence.got.numel() <= findings.EVIDENCE_ELEMS_MAX
    assert evidence.got[first - evidence.start] == 1.0


def test_evidence_may_have_different_sizes():
    finding = findings.differing(
        Finding(check="x", message="y"), torch.zeros(3), torch.zeros(4, dtype=torch.bfloat16)
    )
    assert (finding.evidence.expected.numel(), finding.evidence.got.numel()) == (3, 4)


@pytest.mark.usefixtures("broken")
def test_failed_case_keeps_its_logs(judged):
    result = judged()
    (log,) = result.logs
    assert (len(log.collectives), log.digest()) == (result.collectives, result.log_digest)
    assert "logs" not in result.as_dict()
    assert all("evidence" not in finding for finding in result.as_dict()["findings"])


def test_passed_case_keeps_no_logs(judged):
    assert judged().logs == ()


def test_turns_of_another_run_can_be_repeated(judged):
    world = WorldSpec(size=3, schedule="random")
    first = judged(world=world, keep_logs=True)
    turns = [log.turns for log in first.logs]
    again = judged(world=WorldSpec(size=3), turns=turns)
    assert again.log_digest == first.log_digest
    assert (again.verdict, again.notes) == ("pass", first.notes)
    assert judged(world=WorldSpec(size=3)).log_digest != first.log_digest
