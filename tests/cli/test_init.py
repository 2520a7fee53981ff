"""`zero-sim init`: templates that work unchanged, run as a user would."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from zero_sim.cli import init as module
from zero_sim.cli.init import init
from zero_sim.cli.main import main

TEMPLATES = Path(module.__file__).with_name("templates")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoke(*words):
    return CliRunner().invoke(init, words)


def files(folder):
    return sorted(path.name for path in folder.iterdir())


ENGINE = ["engine.py", "engine.toml", "test_engine.py"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), ENGINE),
        (("--engine",), ENGINE),
        (("--script",), ["train.py"]),
        (("--test",), ["test_ranks.py"]),
        (("--engine", "--script", "--test"), sorted([*ENGINE, "test_ranks.py", "train.py"])),
    ],
)
def test_each_option_writes_its_files(folder, options, expected):
    done = invoke(*options)
    assert done.exit_code == 0, done.output
    assert files(folder) == expected


def test_templates_are_copied_unchanged(folder):
    invoke("--engine", "--script", "--test")
    assert files(folder) == files(TEMPLATES)
    assert all((folder / name).read_text() == (TEMPLATES / name).read_text() for name in ENGINE)


def test_existing_files_are_listed_and_nothing_is_written(folder):
    (folder / "engine.py").write_text("mine")
    (folder / "engine.toml").write_text("mine")
    done = CliRunner().invoke(main, ["init"])
    assert done.exit_code == 2
    assert "got engine.py, engine.toml." in done.output
    assert files(folder) == ["engine.py", "engine.toml"]
    assert (folder / "engine.py").read_text() == "mine"


def test_folder_is_created_and_entered_first(folder):
    done = invoke("new/place", "--script")
    assert files(folder / "new" / "place") == ["train.py"]
    expected = "  cd new/place\n  zero-sim torchrun --against 1 --nproc-per-node 2 train.py\n"
    assert done.output.endswith(f"next:\n{expected}")


def run_next(folder, *options):
    """Run each printed command as a user would. Returns their outputs."""
    lines = invoke(*options).output.partition("next:\n")[2].splitlines()
    outputs = []
    for line in lines:
        program, *words = line.split()
        words = ["20" if word == "200" else word for word in words]
        name = {"pytest": "pytest", "zero-sim": "zero_sim"}[program]
        command = [sys.executable, "-m", name, *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stdout[-2000:], done.stderr[-2000:])
        outputs.append(done.stdout)
    return outputs


def test_engine_template_passes_its_printed_commands(folder):
    test, run, fuzz = run_next(folder)
    assert "1 passed" in test
    assert "8 cases: 8 passed" in run
    assert "params only" not in run
    assert "0 distinct findings" in fuzz
    assert "20 pass;" in fuzz


def test_script_template_passes_its_printed_command(folder):
    (against,) = run_next(folder, "--script")
    assert against.startswith("EQUAL up to rounding")


def test_test_template_passes_its_printed_command(folder):
    (test,) = run_next(folder, "--test")
    assert "4 passed" in test
