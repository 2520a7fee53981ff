"""What needs a GPU says so where there is none; what a stand-in can do runs on the stand-in."""

import pytest
import torch


@pytest.fixture
def device():
    """The accelerator's name: `cuda`, or that of the stand-in device under `make device`."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        pytest.skip("needs a GPU that torch can use, or `make device`")
    return accelerator.type


@pytest.fixture
def gpu():
    """A GPU, where no stand-in will do."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU that torch can use")
    return "cuda"
