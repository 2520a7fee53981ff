"""Hypothesis profiles: number of examples and their seeds.

The environment variable HYPOTHESIS_PROFILE chooses one.

- `ci`, the default: fixed examples, so that only a commit's own changes can fail it.
- `fast`: at most 25 fixed examples.
- `dev`: new examples each time, with failures stored in `.hypothesis`.
- `nightly`: 5,000 new examples each night, and all mutants instead of the core set.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

FAST_EXAMPLES = 25
NIGHTLY_EXAMPLES = 5000


def register_profiles() -> None:
    """Register the profiles and load the one named by the environment."""
    # Speed depends on the machine's load.
    unchecked = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    settings.register_profile("dev", deadline=None, suppress_health_check=unchecked)
    dev = settings.get_profile("dev")
    settings.register_profile("ci", dev, derandomize=True, database=None)
    settings.register_profile("fast", settings.get_profile("ci"), max_examples=FAST_EXAMPLES)
    settings.register_profile("nightly", dev, max_examples=NIGHTLY_EXAMPLES)
    settings.load_profile(_chosen())


def is_nightly() -> bool:
    """Return True under the profile `nightly`."""
    return _chosen() == "nightly"


def at_most(examples: int) -> int:
    """Return the number of examples of a property, which the profile `fast` caps.

    Args:
        examples: Number under all other profiles.
    """
    return min(examples, FAST_EXAMPLES) if _chosen() == "fast" else examples


def _chosen() -> str:
    return os.environ.get("HYPOTHESIS_PROFILE", "ci")
