"""Tests on the stand-in device, which `make device` runs with the device registered.

Registration is permanent, so these tests cannot share a process with other tests.
"""

import pytest
import torch

from tests.standin import NAME


def pytest_runtest_setup(item):
    if not hasattr(torch, NAME):
        pytest.skip("needs a process that knows the stand-in device: make device")
