"""HTML page of a campaign."""

from collections import Counter
from pathlib import Path

import pytest

from zero_sim.fuzz.campaign import Plan
from zero_sim.fuzz.coverage import Coverage
from zero_sim.fuzz.records import Found, Head
from zero_sim.fuzz.totals import CampaignTotals
from zero_sim.report.campaign_page import write_campaign_page
from zero_sim.shrink import Key

FOUND = Found(
    key=Key("equality.grad", "reduce", "dense", "values"), message="<b>differs</b>", seed=5, case=3,
    scenario="schema = 1", bundle="0123456789ab", text="FAIL  drawn", size="2 ranks",
)  # fmt: skip
PLAN = Plan(head=Head(seed=7, target="mine:T", cases=50, shard=(1, 1)), corpus=Path("corpus"))


@pytest.fixture
def page(tmp_path):
    def write(totals, names=("a", "b", "c")):
        path = tmp_path / "campaign.html"
        write_campaign_page(path, totals, plan=PLAN, elapsed=2.0, names=names)
        return path.read_text()

    return write


@pytest.fixture
def totals():
    totals = CampaignTotals()
    totals.found = [FOUND]
    totals.counts.cases = 4
    totals.counts.verdicts.update({"pass": 3, "fail": 1})
    totals.coverage = Coverage(cases=4, features=Counter(a=4, b=2), pairs=Counter({("a", "b"): 2}))
    return totals


def test_verdicts_are_drawn_as_a_bar(page, totals):
    text = page(totals)
    assert 'class="pass" style="width:75.00%"' in text
    assert "fail: 1" in text


def test_finding_contains_its_case_and_replay_command(page, totals):
    text = page(totals)
    assert "schema = 1" in text
    assert "zero-sim replay" in text
    assert "0123456789ab" in text


def test_finding_text_is_escaped(page, totals):
    assert "<b>differs" not in page(totals)


def test_only_pairs_that_occurred_are_drawn(page, totals):
    text = page(totals)
    assert text.count("<rect") == 3  # Features a and b alone, and their pair.
    assert "<title>a + b: 2</title>" in text


def test_campaign_without_cases_has_no_map(page):
    assert "<rect" not in page(CampaignTotals())
