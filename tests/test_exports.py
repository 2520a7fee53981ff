"""Public names, and the cost of importing them."""

import re
import subprocess
import sys

import pytest

import zero_sim

SLOW = ("torch", "pydantic", "numpy", "hypothesis", "rich", "sklearn", "jinja2")


def loaded_after(code):
    """Return the slow packages that a fresh interpreter has loaded after running some code."""
    script = f"{code}\nimport sys\nprint([name for name in {SLOW!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(re.findall(r"\w+", done.stdout.splitlines()[-1]))


def test_all_is_sorted_and_short():
    assert zero_sim.__all__ == sorted(zero_sim.__all__)
    assert len(zero_sim.__all__) <= 30


def test_version_is_exported():
    assert re.fullmatch(r"\d+\.\d+\.\d+", zero_sim.__version__)


@pytest.mark.parametrize("name", zero_sim.__all__)
def test_every_name_resolves_and_is_documented(name):
    assert getattr(zero_sim, name).__doc__
    assert name in dir(zero_sim)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = zero_sim.nothing


@pytest.mark.parametrize(
    ("code", "may_load"),
    [
        ("import zero_sim", set()),
        ("import zero_sim.cli.main", set()),
        ("from zero_sim import Scenario, errors", set()),
        ("from zero_sim import checkpoint_here\ncheckpoint_here('after step')", set()),
        ("from zero_sim import load_scenario", {"pydantic"}),
        (
            "from click.testing import CliRunner\nfrom zero_sim.cli.main import main\n"
            "assert CliRunner().invoke(main, ['--help']).exit_code == 0",
            set(),
        ),
        (
            "from click.testing import CliRunner\nfrom zero_sim.cli.main import main\n"
            "assert CliRunner().invoke(main, ['schema']).exit_code == 0",
            {"pydantic"},
        ),
    ],
)
def test_imports_stay_light(code, may_load):
    """`--help`, completion and collection are fast because torch is not loaded."""
    assert loaded_after(code) <= may_load
