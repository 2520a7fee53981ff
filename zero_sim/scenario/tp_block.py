"""Sizes in model `tp-block`, and conditions under which tensor-parallel ranks can split it."""

from __future__ import annotations

from typing import Final

from zero_sim.scenario.spec import Scenario

POSITIONS: Final = 4
"""Positions in a row."""
# A rank needs whole heads, because attention stays within a head.
HEAD_ELEMS: Final = 2
"""Features per attention head."""
INNER: Final = 2
"""Inner layer width, as a multiple of `model.hidden`."""
SHARED: Final = "positions.weight"
"""The only param that every tensor-parallel rank has whole."""
# With the implicit bit: all integers up to 2^bits are exact.
_SIGNIFICAND_BITS = {"fp32": 24, "bf16": 8, "fp16": 11}


def is_tp_block(scenario: Scenario) -> bool:
    """Return True if a case trains `tp-block`."""
    return scenario.model.name == "tp-block"


def part_ending(index: int) -> str:
    """Return the name ending for params that only one tensor-parallel index has."""
    return f".part{index}"


def rows_of(scenario: Scenario, *, rank: int) -> int:
    """Return how many rows the workload draws for a group rank's micro-batch."""
    data = scenario.data
    # With the same data on all ranks, all ranks have rank 0's rows.
    return data.rows + (rank % 3 if data.uneven_rows and data.ranks == "distinct" else 0)


def activation_elems(scenario: Scenario, *, rows: int) -> int:
    """Return the number of elements between two blocks, [rows, positions, hidden]."""
    return rows * POSITIONS * scenario.model.hidden


def terms_max(scenario: Scenario) -> int:
    """Return the largest number of terms (-1, 0 or 1) that a layer adds, forward or backward.

    A sum is exact in the working dtype if the dtype has all integers up to this number.
    """
    rows = scenario.data.rows + (2 if scenario.data.uneven_rows else 0)
    width = scenario.model.hidden
    # In this order: inputs of `down`; gradients of x through query, key and value; rows x positions
    # in a weight's gradient; attention within a head. 1 more for the residual.
    return max(INNER * width, 3 * width, rows * POSITIONS, POSITIONS * HEAD_ELEMS) + 1


def is_exact(scenario: Scenario) -> bool:
    """Return True if no layer rounds a sum, so that a split changes no bit."""
    return terms_max(scenario) <= 2 ** _SIGNIFICAND_BITS[scenario.model.dtype]


def splits_heads(scenario: Scenario) -> bool:
    """Return True if each tensor-parallel rank has whole heads."""
    return scenario.model.hidden % (HEAD_ELEMS * max(1, scenario.topology.tp)) == 0
