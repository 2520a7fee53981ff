"""Fixtures that run a user's session with the plugin."""

from importlib.metadata import entry_points

import pytest

# torch loads this at the first optimizer step, and only once; pytester would unload it.
import torch._dynamo  # noqa: F401


@pytest.fixture(scope="session")
def plugin_options():
    """Options that load the plugin, empty if it is installed."""
    names = [point.value for point in entry_points(group="pytest11")]
    return () if "zero_sim.pytest_plugin" in names else ("-p", "zero_sim.pytest_plugin")


@pytest.fixture
def run(pytester, plugin_options):
    """Function that runs the files made by pytester in this process."""

    def run_session(*args):
        return pytester.runpytest_inprocess(*plugin_options, "-p", "no:cacheprovider", *args)

    return run_session
