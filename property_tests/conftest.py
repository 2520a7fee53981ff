"""Profiles of Hypothesis, and worlds shared by all cases."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from zero_sim.launch import WorldPool

settings.register_profile(
    "dev", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, database=None)
settings.register_profile("nightly", settings.get_profile("dev"), max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def pool():
    with WorldPool() as worlds:
        yield worlds
