"""Import contracts: the package keeps them, and a violation is caught."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def lint(folder):
    tool = Path(sys.executable).parent / "lint-imports"
    if not tool.exists():
        pytest.skip("import-linter is not installed")
    return subprocess.run(
        [tool, "--no-cache"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"},
    )


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(
        ROOT / "zero_sim", tmp_path / "zero_sim", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_package_keeps_the_import_contracts(copy):
    done = lint(copy)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("reference/oracle.py", "import zero_sim.layout", "The oracle shares no code"),
        ("layout/span.py", "import torch", "Planning is done in integers"),
        ("zero/buffer.py", "import zero_sim.sim", "Imports only point down"),
        (
            "sim/world/rank_threads.py",
            "if TYPE_CHECKING:\n    from zero_sim.sim.world import c10d",
            "No circles between rooms",
        ),
    ],
)
def test_planted_import_is_caught(copy, module, line, contract):
    with (copy / "zero_sim" / module).open("a") as source:
        source.write(f"\n{line}\n")
    done = lint(copy)
    assert done.returncode != 0
    broken = done.stdout[done.stdout.index("Broken contracts") :]
    assert contract in broken
