"""Correct settings and planted faults of whole scripts.

`property_tests/against_settings.py` judges more settings and prints figures.
"""

import warnings

import pytest

from property_tests.against_settings import FAULTS, RIGHT_MAX, SCRIPTS, draw, judge

FIRST = {setting.script: setting for setting in draw(300, seed=0)}


@pytest.fixture(autouse=True)
def in_scripts(monkeypatch):
    monkeypatch.chdir(SCRIPTS)
    monkeypatch.setattr(warnings, "filters", [])
    warnings.simplefilter("ignore")


def tiered(cases, fast):
    """Return cases with ids; one in `fast` is judged on every change."""
    return [
        pytest.param(
            case,
            id=f"{case.script} {case.arguments}",
            marks=() if index % fast == 0 else pytest.mark.slow,
        )
        for index, case in enumerate(cases)
    ]


@pytest.mark.parametrize("setting", tiered(FIRST.values(), 3))
def test_correct_setting_is_equal(setting):
    for _, verdict in judge(setting.script, setting.arguments, setting.sizes[:1]):
        assert verdict.outcome == "equal", verdict
        assert verdict.largest_multiple < RIGHT_MAX


@pytest.mark.parametrize("fault", tiered(FAULTS, 12))
def test_planted_fault_is_found(fault):
    for _, verdict in judge(fault.script, fault.arguments, (fault.ranks,)):
        assert verdict.outcome == fault.outcome, verdict
