"""Cases to judge, and one pool of worlds for all of them."""

import pytest

from zero_sim.launch import WorldPool
from zero_sim.scenario.spec import DataSpec, ModelSpec, RunSpec, Scenario, SystemSpec, WorldSpec
from zero_sim.verify import run_case


@pytest.fixture(scope="session")
def pool():
    with WorldPool() as worlds:
        yield worlds


@pytest.fixture
def judged(pool):
    """Run a small case; keyword arguments replace whole parts of it."""

    def run(target=None, *, turns=(), keep_logs=False, **parts):
        chosen = {
            "model": ModelSpec(name="mlp", dtype="bf16", hidden=5),
            "world": WorldSpec(size=3),
            "system": SystemSpec(),
            "data": DataSpec(),
            "run": RunSpec(steps=2),
            **parts,
        }
        scenario = Scenario(schema=1, name="case", **chosen)
        return run_case(scenario, pool=pool, target=target, turns=turns, keep_logs=keep_logs)

    return run
