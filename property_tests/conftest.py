"""Hypothesis profiles, and worlds shared by all cases."""

import pytest
import torch

from tests.older_torch import provide_names
from tests.profiles import register_profiles
from zero_sim.backends.worlds import WorldPool

register_profiles()
provide_names()


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
