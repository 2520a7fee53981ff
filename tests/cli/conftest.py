"""Fixtures: the command line in an empty folder, and a system that can be broken."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from zero_sim.cli import main as cli
from zero_sim.zero.optimizer import DistributedOptimizer

CASE = """schema = 1
[model]
name = "mlp"
hidden = 5
[run]
steps = 1
[world]
size = 3
schedule = "random"
"""
SEVERAL = CASE + '[matrix]\n"run.seed" = [1, 2]\n'


@pytest.fixture
def invoke(monkeypatch, tmp_path):
    """Run the command line in an empty folder with two scenarios."""
    monkeypatch.chdir(tmp_path)
    Path("one.toml").write_text(CASE)
    Path("several.toml").write_text(SEVERAL)
    return lambda *arguments: CliRunner().invoke(cli.main, [str(word) for word in arguments])


@pytest.fixture
def broken(monkeypatch):
    """Return a switch that disables the division of sums."""
    right = DistributedOptimizer.step

    def undivided(self):
        with torch.no_grad():
            self.ddp.divisor.fill_(1.0)
        return right(self)

    def switch(on):
        monkeypatch.setattr(DistributedOptimizer, "step", undivided if on else right)

    return switch


@pytest.fixture
def bundle(invoke, broken):
    """Id of a bundle from the broken system, which is repaired afterwards."""
    broken(True)
    invoke("run", "one.toml")
    broken(False)
    (path,) = Path(".zero-sim/bundles").iterdir()
    return path.name
