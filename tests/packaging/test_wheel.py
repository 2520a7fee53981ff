"""The wheel in an environment without the checkout."""

import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

import zero_sim

ROOT = Path(__file__).resolve().parents[2]


def test_wheel_version_is_the_package_version():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == (
        zero_sim.__version__
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, ROOT],
        check=True, capture_output=True,
    )  # fmt: skip
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """A new environment with the wheel, and the other packages of this environment."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    installed = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(installed, check=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    # Python reads no .pth file in folders added by another one, so the checkout stays invisible.
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder


@pytest.fixture
def run(environment, tmp_path):
    without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words, ok=True):
        ended = subprocess.run(
            [environment / "bin" / words[0], *words[1:]],
            cwd=tmp_path, env=without, capture_output=True, text=True,
        )  # fmt: skip
        assert not ok or ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    return run


def test_wheel_contains_licence_type_marker_and_scenarios(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {"zero_sim/py.typed", "zero_sim/smoke/mlp.toml"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_metadata_has_licence_author_and_classifiers(wheel):
    files = zipfile.ZipFile(wheel)
    (path,) = (name for name in files.namelist() if name.endswith("METADATA"))
    metadata = files.read(path).decode()
    for line in ("License-Expression: Apache-2.0", "Author: ", "Classifier: Typing :: Typed"):
        assert line in metadata


def test_installed_package_is_imported(run, environment):
    where = run("python", "-c", "import zero_sim; print(zero_sim.__file__)")
    assert where.startswith(str(environment))


def test_shipped_scenarios_run_without_a_path(run):
    assert " passed in " in run("zero-sim", "run", "-k", "mlp").splitlines()[-1]


def test_first_engine_passes(run):
    run("zero-sim", "init")
    assert "passed" in run("zero-sim", "run", "engine.toml", "--target", "engine:MyTarget")
