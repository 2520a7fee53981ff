"""What needs a GPU, and says so where there is none."""

import pytest
import torch


def pytest_runtest_setup(item):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU that torch can use")
