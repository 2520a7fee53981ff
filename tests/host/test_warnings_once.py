"""Warnings that are told once."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from zero_sim.host import warnings_once as warned


@pytest.fixture
def told(monkeypatch):
    """What is told, with a filter that lets everything through."""
    lines = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(sys, "warnoptions", [])
        monkeypatch.setattr(warnings, "showwarning", lambda *args: lines.append(str(args[0])))
        yield lines


def old(text="old", category=FutureWarning):
    warnings.warn(text, category, stacklevel=1)


def test_one_of_one_line_is_told_once_whatever_it_says(told):
    with warned.telling_once():
        for number in range(3):
            old(f"param {number} is old")
        old("of another kind", UserWarning)
    assert told == ["param 0 is old", "of another kind"]


def test_afterwards_all_is_as_it_was(told):
    before = warnings.showwarning
    with warned.telling_once():
        old()
    assert warnings.showwarning is before
    assert "ZERO_SIM_WARNED" not in os.environ


def test_who_asks_for_warnings_gets_all(told, monkeypatch):
    monkeypatch.setattr(sys, "warnoptions", ["always"])
    with warned.telling_once():
        old()
        old()
    assert told == ["old", "old"]


def test_another_process_does_not_tell_it_again(told, tmp_path):
    code = (
        "import sys, warnings; from zero_sim.host import warnings_once as warned;"
        "warned.tell_once();"
        "warnings.warn_explicit('w', FutureWarning, 'file.py', 3)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONWARNINGS": ""}
    with warned.telling_once():
        env["ZERO_SIM_WARNED"] = os.environ["ZERO_SIM_WARNED"]
        said = [
            subprocess.run([sys.executable, "-c", code], env=env, capture_output=True).stderr
            for _ in range(2)
        ]
    assert said == [b"file.py:3: FutureWarning: w\n", b""]


def test_without_room_it_is_told_all_the_same(told, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ZERO_SIM_WARNED", str(tmp_path / "file" / "below"))
    warned.tell_once()
    old()
    old()
    assert told == ["old"]
