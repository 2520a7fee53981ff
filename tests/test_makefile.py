"""Output of `make run` and `make test`: their actions and the next command."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make(*arguments):
    """Run make in the repository."""
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def venv(tmp_path):
    """A ready environment whose tools print their call and fail."""
    bins = tmp_path / "bin"
    bins.mkdir()
    for name in ("zero-sim", "python"):
        (bins / name).write_text(f"#!/bin/sh\necho {name} was called with $@\nexit 3\n")
        (bins / name).chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(("target", "tool"), [("run", "zero-sim"), ("test", "python")])
def test_make_prints_its_action_and_the_next_command_after_failure(venv, target, tool):
    done = make(target, f"VENV={venv}", "--assume-old", f"{venv}/.installed")
    first, called, _, last = done.stdout.splitlines()
    assert first.startswith("== ")
    assert called.startswith(f"{tool} was called with ")
    assert last == (
        f"To go on: {venv}/bin/zero-sim --help, or first . {venv}/bin/activate and then "
        "zero-sim --help"
    )
    assert done.returncode == 2


def test_every_setup_stage_is_announced_and_pip_is_verbose(tmp_path):
    lines = make("--dry-run", "run", f"VENV={tmp_path}").stdout.splitlines()
    installs = [index for index, line in enumerate(lines) if " pip install " in line]
    assert len(installs) == 2
    for index in installs:
        assert "quiet" not in lines[index]
        assert lines[index - 1].startswith('echo "== ')
