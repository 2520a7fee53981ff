"""The stand-in device: its build and a few cases. `make device` runs all its tests."""

import subprocess
import sys

from tests.standin import NAME, ROOT


def run(*command):
    return subprocess.run(
        [sys.executable, "-m", "tests.standin", sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_shipped_cases_pass_on_the_standin():
    files = [
        ROOT / "scenarios" / name
        for name in ("edge/one-param.toml", "features/division.toml", "targets/torch-fsdp2.toml")
    ]
    done = run("-m", "zero_sim", "run", *map(str, files), "--device", NAME, "--verbose")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "note: computed on standin (stand-in device): deterministic algorithms" in done.stdout


def test_standin_passes_its_own_tests():
    done = run("-m", "pytest", "--quiet", "tests/device/test_standin.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
