"""Explanations of checks, from `explanations.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources

from zero_sim.errors import UsageError
from zero_sim.scenario.checks import Check


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Explanation of a check."""

    check: Check
    meaning: str
    """The rule that a finding breaks, or the event that it reports."""
    why: str
    """The damage in training."""
    causes: tuple[str, ...]
    """Usual causes, the most frequent first."""
    next: str
    """The first thing to do after a finding."""
    seen_in: tuple[str, ...] = ()
    """Public bugs of this kind, as `project#number: description`."""


def _read() -> dict[str, Explanation]:
    # Ignore line breaks in the file, because renderers wrap the text.
    text = resources.files("zero_sim.report").joinpath("explanations.toml").read_text("utf-8")
    return {
        check: Explanation(
            check=Check(check),
            meaning=" ".join(entry["meaning"].split()),
            why=" ".join(entry["why"].split()),
            causes=tuple(entry["causes"]),
            next=" ".join(entry["next"].split()),
            seen_in=tuple(entry.get("seen_in", ())),
        )
        for check, entry in tomllib.loads(text).items()
    }


# Read at import, so that an entry for an unknown check fails at once.
EXPLANATIONS = _read()


def explain(check: str) -> Explanation:
    """Explain a check.

    Args:
        check: Its id, such as `equality.grad`.

    Raises:
        UsageError: If the check does not exist. The message lists all checks.
    """
    try:
        return EXPLANATIONS[check]
    except KeyError:
        known = ", ".join(sorted(EXPLANATIONS))
        raise UsageError(f"expected one of the checks {known}; got {check!r}") from None
