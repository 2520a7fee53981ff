"""Tests on the stand-in device; `make device` runs them where torch knows it.

Registered once, it is there for good, so none of them may run in the process of other tests.
"""

import pytest
import torch

from tests.standin import NAME


def pytest_runtest_setup(item):
    if not hasattr(torch, NAME):
        pytest.skip("needs a process that knows the stand-in device: make device")
