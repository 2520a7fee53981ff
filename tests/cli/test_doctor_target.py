"""`zero-sim doctor --target`: state that a library keeps once per process."""

import sys
from pathlib import Path

import pytest

from tests.run.keeper import LIBRARY, NAMES


@pytest.fixture
def library(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("keeper_lib.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("keeper_lib", None)


@pytest.mark.usefixtures("library")
def test_printed_declaration_can_be_pasted(invoke):
    ran = invoke("doctor", "--target", "tests.run.keeper:Keeper", "--package", "keeper_lib")
    assert ran.exit_code == 0, ran.output
    assert "4 changed." in ran.stdout
    assert "two-ranks-at-stage-0, with these alone: pass" in ran.stdout
    pasted = {"RankLocal": dict}
    exec(ran.stdout[ran.stdout.index("rank_local = ") :], pasted)
    assert pasted["rank_local"] == {"names": NAMES}


def test_unknown_package_is_refused(invoke):
    ran = invoke("doctor", "--target", "torch-ddp", "--package", "keeper_libb")
    assert ran.exit_code == 2
    assert "expected a top-level package that can be imported, got 'keeper_libb'" in ran.stderr


@pytest.mark.usefixtures("library")
def test_library_without_state_needs_no_declaration(invoke):
    Path("quiet_lib.py").write_text("LIMIT = 3\n")
    ran = invoke("doctor", "--target", "torch-ddp", "--package", "quiet_lib")
    assert "you need not declare `rank_local`" in ran.stdout
