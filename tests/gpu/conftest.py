"""Fixtures that skip tests if the machine has neither a GPU nor a sufficient stand-in."""

import pytest
import torch


@pytest.fixture
def device():
    """Name of the accelerator: `cuda`, or the stand-in device under `make device`."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        pytest.skip("needs a GPU that torch can use, or `make device`")
    return accelerator.type


@pytest.fixture
def gpu():
    """Name of a real GPU, for tests that the stand-in cannot run."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU that torch can use")
    return "cuda"
