"""Right settings and planted faults of whole scripts; `property_tests/against_settings.py` has all."""

import warnings

import pytest

from property_tests.against_settings import FAULTS, RIGHT_MAX, SCRIPTS, draw, judge

FIRST = {setting.script: setting for setting in draw(300, seed=0)}


@pytest.fixture(autouse=True)
def in_scripts(monkeypatch):
    monkeypatch.chdir(SCRIPTS)
    monkeypatch.setattr(warnings, "filters", [])
    warnings.simplefilter("ignore")


@pytest.mark.parametrize("setting", FIRST.values(), ids=FIRST)
def test_right_setting_is_equal(setting):
    for _, verdict in judge(setting.script, setting.arguments, setting.sizes[:1]):
        assert verdict.outcome == "equal", verdict
        assert verdict.largest_multiple < RIGHT_MAX


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.script} {fault.arguments}")
def test_planted_fault_is_found(fault):
    for _, verdict in judge(fault.script, fault.arguments, (fault.ranks,)):
        assert verdict.outcome == fault.outcome, verdict
