"""Committed digests of the ternary net, on this machine and on simpler instruction sets."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parent
SCRIPT = FOLDER / "digests.py"
GOLDEN = json.loads((FOLDER / "ternary.json").read_text())


@pytest.fixture(scope="module")
def here():
    spec = importlib.util.spec_from_file_location("digests", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.all_digests()


@pytest.mark.parametrize("case", GOLDEN)
def test_digests_match_committed_values(here, case):
    assert here[case] == GOLDEN[case]


def test_every_case_has_a_committed_digest(here):
    assert here.keys() == GOLDEN.keys()


def test_every_step_moves_the_masters():
    for steps in GOLDEN.values():
        assert len(set(steps)) == len(steps) == 6


def test_digests_do_not_depend_on_the_instruction_set():
    plain = {
        "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, **plain, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == GOLDEN
