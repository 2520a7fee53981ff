"""Reports of several processes are merged into one result, with errors charged to their cause."""

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from zero_sim.errors import EnvironmentProblem
from zero_sim.findings.records import Evidence, Finding
from zero_sim.judge.copies import Copy
from zero_sim.judge.grad_stats import PartStats, ReportedStats
from zero_sim.judge.guarantee import Width
from zero_sim.judge.judge_report import JudgeReport, RankDigests
from zero_sim.judge.rules_tried import RulesTried
from zero_sim.run.reports import CaseRun, Failure, Report, result_of
from zero_sim.scenario.spec import ModelSpec, Scenario, WorldSpec

CASE = Scenario(schema=1, name="case", model=ModelSpec(name="mlp"), world=WorldSpec(size=2))
GONE = Failure(kind="system", message="RuntimeError: Connection closed by peer", rank=1, time=1.0)
ONE = torch.ones(1)
LOST = Finding(check="world.rank-died", rank=0, message="rank 0: its process ended")


def result(*reports):
    return result_of(CASE, CaseRun(reports=reports))


@pytest.mark.parametrize("kind", ["user", "judge"])
@pytest.mark.parametrize("time", [0.0, 2.0])
def test_errors_after_the_first_rank_gave_up_are_ignored(kind, time):
    """Clocks of two machines need not agree on the first failure."""
    gave_up = Failure(kind=kind, message="expected another case", rank=0, time=time)
    told = result(Report(failure=gave_up), Report(failure=GONE))
    assert (told.verdict, told.error) == ("error", "expected another case")


def test_failed_judge_is_named_by_its_rank():
    failure = Failure(kind="judge", message="the judge itself failed", detail="where", rank=1)
    (finding,) = result(Report(), Report(failure=failure)).findings
    assert (finding.check, finding.rank, finding.detail) == ("internal.judge", 1, "where")


@pytest.mark.parametrize("kind", ["user", "judge"])
def test_earlier_finding_stands_and_the_error_is_noted(kind):
    told = result(Report(found=[LOST]), Report(failure=Failure(kind=kind, message="expected more")))
    assert told.verdict == "fail"
    assert told.findings[0] == LOST
    assert "expected more, after the findings" in told.notes


def test_findings_are_sorted_by_time():
    late = Failure(kind="system", message="ValueError: enough", rank=0, time=0.5)
    told = result(Report(failure=late), Report(failure=GONE))
    assert [finding.rank for finding in told.findings] == [0, 1]


def test_environment_problem_comes_first():
    lacks = Failure(kind="machine", message="expected a GPU", rank=1, time=9.0)
    with pytest.raises(EnvironmentProblem, match="expected a GPU"):
        result(Report(found=[LOST]), Report(failure=lacks))


def test_report_survives_json():
    found = replace(
        LOST,
        index=(1, 2),
        differ_spans=((0, 3),),
        evidence=Evidence(start=0, expected=ONE, got=ONE),
    )
    tried = RulesTried(assumed="clip = 'a'", tried=2, fitting=("b",), blind="too small")
    judged = JudgeReport(
        world_ranks=(0, 2),
        first_step=1,
        has_started=True,
        compared_elems=5,
        nonzero_fraction_max=0.5,
        same_data=False,
        has_stepped=True,
        uncertified_step=None,
        unobserved=frozenset({"norm"}),
        guarantees=Counter({"one-sum": 3}),
        width=Width(reach=1e-7, signless=2),
        digests=RankDigests(
            copies=(Copy(step=0, what="norm", param="", start=0, rank=2, digest="ab"),),
            part_stats=(PartStats(step=0, param="w", start=0, squares=math.inf, terms=1, zeros=0),),
            reported=(ReportedStats(step=0, rank=2, norm=None, zeros=1, terms=1),),
        ),
        rules=RulesTried(assumed="", tried=1, fitting=(), what="mistake", also=tried),
        bad_step=1,
        findings=(found,),
    )
    report = Report(judged=[judged], found=[found], failure=GONE, accuracy=0.5, system_notes=["so"])
    heard = Report.from_dict(json.loads(json.dumps(report.as_dict())))
    assert heard == replace(report, drifts=[], measured=[])
    assert heard.found[0].evidence is None
