"""Targets of libraries, checked without the libraries themselves."""

import sys
import tomllib
from pathlib import Path

import pytest

from zero_sim.scenario.discover import discover
from zero_sim.scenario.load import load_cases
from zero_sim.targets import (
    capabilities_of,
    find_target,
    library_target_names,
    name_of,
    rank_local_of,
    target_names,
    why_missing,
)

ROOT = Path(__file__).parents[2]
NAMES = library_target_names()


@pytest.mark.parametrize("name", NAMES)
def test_library_target_is_found_by_name_with_capabilities(name):
    target = find_target(name)
    assert name_of(target) == name
    assert name not in target_names()
    assert capabilities_of(target).stages
    rank_local_of(target)


@pytest.mark.parametrize("name", NAMES)
def test_extra_installs_a_pinned_version(name):
    library = find_target(name).library
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = project["optional-dependencies"][library.extra]
    package = wanted.partition(">=")[0]
    pins = (ROOT / "constraints-libraries.txt").read_text().splitlines()
    assert [line for line in pins if line.startswith(f"{package}==")] == [library.judged]


def test_importing_zero_sim_imports_no_library():
    packages = {find_target(name).library.package.partition(".")[0] for name in NAMES}
    assert packages
    assert packages.isdisjoint(sys.modules)


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_scenario_runs_each_library(name):
    cases = [
        case
        for folder in ("libraries", "upstream")
        for case in discover([str(ROOT / "scenarios" / folder)]).cases
    ]
    assert any(case.scenario.system.target == name for case in cases)


def test_missing_library_is_reported_with_its_install_command():
    said = [why_missing(find_target(name)) for name in NAMES]
    assert all("Try `pip install" in why for why in said if why)


UPSTREAM = sorted((ROOT / "scenarios" / "upstream").glob("*.py"))
WITHOUT_TARGET = {"accelerate", "examples", "fairscale"}
"""Libraries and public examples that have scripts but no target."""


@pytest.mark.parametrize("path", UPSTREAM, ids=lambda path: path.stem)
def test_known_divergence_has_a_complete_report(path):
    script, text = (path.with_suffix(suffix).read_text() for suffix in (".py", ".md"))
    assert "zero_sim" not in script
    assert "torchrun" in script
    assert "Version: " in text
    assert f"`{path.stem}`" in (path.parent / "README.md").read_text()


@pytest.mark.parametrize("path", UPSTREAM, ids=lambda path: path.stem)
def test_known_divergence_of_a_target_has_a_case_that_expects_it(path):
    case = path.with_suffix(".toml")
    # The exception is about a function that no torch target calls.
    if path.stem.partition("-")[0] in WITHOUT_TARGET or path.stem == "torch-state-without-tensors":
        assert not case.exists()
        return
    (scenario,) = load_cases(case)
    assert scenario.expect.finding


def test_each_case_of_a_known_divergence_has_a_script():
    assert {path.stem for path in UPSTREAM[0].parent.glob("*.toml")} <= {p.stem for p in UPSTREAM}
