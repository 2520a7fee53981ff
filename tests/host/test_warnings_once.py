"""Warnings that are shown once."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from zero_sim.host import warnings_once as warned


@pytest.fixture
def told(monkeypatch):
    """Shown warnings, with a filter that lets everything through."""
    lines = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(sys, "warnoptions", [])
        monkeypatch.setattr(warnings, "showwarning", lambda *args: lines.append(str(args[0])))
        yield lines


def old(text="old", category=FutureWarning):
    warnings.warn(text, category, stacklevel=1)


def test_warning_of_a_line_is_shown_once_for_any_text(told):
    with warned.showing_warnings_once():
        for number in range(3):
            old(f"param {number} is old")
        old("of another kind", UserWarning)
    assert told == ["param 0 is old", "of another kind"]


def test_warning_state_is_restored(told):
    before = warnings.showwarning
    with warned.showing_warnings_once():
        old()
    assert warnings.showwarning is before
    assert "ZERO_SIM_WARNED" not in os.environ


def test_warning_options_of_the_user_show_all(told, monkeypatch):
    monkeypatch.setattr(sys, "warnoptions", ["always"])
    with warned.showing_warnings_once():
        old()
        old()
    assert told == ["old", "old"]


def test_warning_is_shown_once_across_processes(told, tmp_path):
    code = (
        "import sys, warnings; from zero_sim.host import warnings_once as warned;"
        "warned.show_warnings_once();"
        "warnings.warn_explicit('w', FutureWarning, 'file.py', 3)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONWARNINGS": ""}
    with warned.showing_warnings_once():
        env["ZERO_SIM_WARNED"] = os.environ["ZERO_SIM_WARNED"]
        said = [
            subprocess.run([sys.executable, "-c", code], env=env, capture_output=True).stderr
            for _ in range(2)
        ]
    assert said == [b"file.py:3: FutureWarning: w\n", b""]


def test_unwritable_record_still_shows_the_warning(told, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ZERO_SIM_WARNED", str(tmp_path / "file" / "below"))
    warned.show_warnings_once()
    old()
    old()
    assert told == ["old"]
