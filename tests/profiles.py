"""Hypothesis profiles: how many examples, and whether they are the same each time.

The environment variable HYPOTHESIS_PROFILE chooses one.

- `ci`, the default: the same examples each time, so that a commit passes or fails for its own sake.
- `fast`: at most 25 examples, the same each time.
- `dev`: other examples each time, and failures remembered in `.hypothesis`.
- `nightly`: 5,000 examples, other ones each night, and all mutants in place of the core set.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

FAST_EXAMPLES = 25
NIGHTLY_EXAMPLES = 5000


def register_profiles() -> None:
    """Tell Hypothesis of the profiles, and load the one that the environment names."""
    # How fast a machine draws depends on who else uses it.
    unchecked = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    settings.register_profile("dev", deadline=None, suppress_health_check=unchecked)
    dev = settings.get_profile("dev")
    settings.register_profile("ci", dev, derandomize=True, database=None)
    settings.register_profile("fast", settings.get_profile("ci"), max_examples=FAST_EXAMPLES)
    settings.register_profile("nightly", dev, max_examples=NIGHTLY_EXAMPLES)
    settings.load_profile(_chosen())


def is_nightly() -> bool:
    """Whether the environment names the profile `nightly`."""
    return _chosen() == "nightly"


def at_most(examples: int) -> int:
    """Return the number of examples of a property, which the profile `fast` caps.

    Args:
        examples: Number in all other profiles.
    """
    return min(examples, FAST_EXAMPLES) if _chosen() == "fast" else examples


def _chosen() -> str:
    return os.environ.get("HYPOTHESIS_PROFILE", "ci")
