"""Judges on real worker processes."""

import importlib.util
import sys
from pathlib import Path

import pytest

from zero_sim.rules.judging import EXPLAINER
from zero_sim.run.real_judge import on_workers
from zero_sim.run.setup import Setup
from zero_sim.scenario.spec import ModelSpec, RunSpec, Scenario, SystemSpec, WorldSpec

TARGETS = "zero_sim_test_targets"


@pytest.fixture(scope="package")
def told(tmp_path_factory):
    """Folder in which the target `tells` writes its files."""
    return tmp_path_factory.mktemp("told")


@pytest.fixture(scope="package")
def targets():
    """Module of targets, imported in this process."""
    spec = importlib.util.spec_from_file_location(TARGETS, Path(__file__).with_name("targets.py"))
    module = sys.modules[TARGETS] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="package")
def judge_on_gloo(tmp_path_factory, told):
    """One judge, so that all tests share its workers; each test sets the target."""
    folder = tmp_path_factory.mktemp("targets")
    source = Path(__file__).with_name("targets.py").read_text()
    folder.joinpath(f"{TARGETS}.py").write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}:{Path(__file__).parents[3]}")
        patch.setenv("ZERO_SIM_TEST_TELLS", str(told))
        with on_workers(Setup(backend="gloo"), explainer=EXPLAINER) as judge:
            yield judge


def case(**parts):
    chosen = {
        "model": ModelSpec(name="mlp", dtype="bf16", hidden=5),
        "world": WorldSpec(size=3),
        "system": SystemSpec(),
        "run": RunSpec(steps=3),
        **parts,
    }
    return Scenario(schema=1, name="case", **chosen)


@pytest.fixture
def on_gloo(judge_on_gloo, monkeypatch):
    """Run a small case on gloo workers; keyword arguments replace parts of it."""

    def run(target="", *, setup=None, **parts):
        monkeypatch.setattr(judge_on_gloo, "_target", target and f"{TARGETS}:{target}")
        monkeypatch.setattr(judge_on_gloo, "setup", setup or Setup(backend="gloo"))
        return judge_on_gloo(case(**parts))

    return run


@pytest.fixture
def make_case():
    """Return a maker of the same small case."""
    return case
