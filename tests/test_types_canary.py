"""Canary of the type checker: it reports planted errors."""

import subprocess
import sys
from pathlib import Path

import pytest

CANARY = """
from zero_sim.layout import Span

def wrong_argument() -> Span:
    return Span("0", 1)

def wrong_return(span: Span) -> str:
    return span.numel

def no_such_attribute(span: Span) -> int:
    return span.length
"""


def test_planted_type_errors_are_reported(tmp_path):
    tool = Path(sys.executable).parent / "pyrefly"
    if not tool.exists():
        pytest.skip("pyrefly is not installed")
    (tmp_path / "canary.py").write_text(CANARY)
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [
            tool,
            "check",
            "--config",
            root / "pyproject.toml",
            "--python-interpreter-path",
            sys.executable,
            tmp_path / "canary.py",
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
    )
    assert done.returncode != 0
    for error in ("bad-argument-type", "bad-return", "missing-attribute"):
        assert error in done.stdout + done.stderr
