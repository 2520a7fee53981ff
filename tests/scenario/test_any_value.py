"""Any value in any field is refused with a message, or makes a case that can be judged."""

from __future__ import annotations

import copy
import random

import pytest

from zero_sim import run_case
from zero_sim.scenario.decode import decode
from zero_sim.scenario.fields import field_paths

VALUES = [
    0, -1, 1, 2**31, 2**63 - 1, -(2**63), 1e308, -1e308, 5e-324, float("nan"), float("inf"), 0.5,
    True, "", "x", "a\n\x1b[31mPASS", "n" * 5000, "\ud800", ["\ud800", {"x": "\udfff"}],
    [], [0], [[]], {}, {"x": 1},
]  # fmt: skip
BASE = {
    "schema": 1,
    "name": "x",
    "model": {"name": "mlp", "hidden": 3, "blocks": 1},
    "run": {"steps": 1},
    "world": {"size": 2},
}
BESIDE = {
    "data.nan.": {"data": {"nan": {"step": 0, "rank": 0}}},
    "reload.": {"reload": {"step": 1}, "run": {"steps": 2}},
}
"""Tables that a field requires."""
OWN_FINDINGS = {"data.nan.step", "data.nan.rank", "expect.nonzero_min"}
"""Fields that may demand a finding or certainty."""


def with_value(path, value):
    """Return the tables of a file with this value in one field."""
    raw = copy.deepcopy(BASE)
    for prefix, tables in BESIDE.items():
        if path.startswith(prefix):
            raw.update(copy.deepcopy(tables))
    *parents, last = path.split(".")
    table = raw
    for name in parents:
        table = table.setdefault(name, {})
    table[last] = value
    return raw


@pytest.mark.parametrize("path", field_paths())
def test_any_value_is_refused_or_judged(path, pool):
    """One of the accepted cases is run to its end; findings are allowed only if demanded."""
    cases = []
    for value in VALUES:
        scenario, problems = decode(with_value(path, value))
        if scenario is not None:
            cases.append(scenario)
            continue
        assert problems
        assert all(str(problem).isprintable() for problem in problems)
        assert max(len(str(problem)) for problem in problems) < 2_000
    assert len(cases) < len(VALUES) / 2
    if cases:
        result = run_case(random.Random(path).choice(cases), pool=pool)
        assert result.verdict != "fail" or path in OWN_FINDINGS
