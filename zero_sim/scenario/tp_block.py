"""Sizes of the model `tp-block`, and what splitting it over ranks asks of a case."""

from __future__ import annotations

from typing import Final

from zero_sim.scenario.spec import Scenario

POSITIONS: Final = 4
"""Of a row."""
HEAD_ELEMS: Final = 2
"""Features of a head."""
INNER: Final = 2
"""How much wider the inner layer is."""
SHARED: Final = "positions.weight"
"""The one param that every tensor-parallel rank holds whole."""
_SIGNIFICAND_BITS = {"fp32": 24, "bf16": 8, "fp16": 11}


def is_tp_block(scenario: Scenario) -> bool:
    """Whether a case trains it."""
    return scenario.model.name == "tp-block"


def part_ending(index: int) -> str:
    """How the names of the params end that only the tensor-parallel ranks of an index hold."""
    return f".part{index}"


def rows_of(scenario: Scenario, *, rank: int) -> int:
    """Rows of a micro-batch of a rank of a dp-cp group, as its workload draws them."""
    data = scenario.data
    return data.rows + (rank % 3 if data.uneven_rows and data.ranks == "distinct" else 0)


def activation_elems(scenario: Scenario, *, rows: int) -> int:
    """Elements between two blocks, of a micro-batch."""
    return rows * POSITIONS * scenario.model.hidden


def terms_max(scenario: Scenario) -> int:
    """The most terms of -1, 0 or 1 that a layer adds, forward or backward.

    A sum of as many stays exact in the working dtype if that holds all whole numbers up to it.
    """
    rows = scenario.data.rows + (2 if scenario.data.uneven_rows else 0)
    width = scenario.model.hidden
    # Inputs of `down`; outputs of query, key and value, whose gradients of x are added; rows and
    # positions in the gradient of a weight; one more for the residual.
    return max(INNER * width, 3 * width, rows * POSITIONS, POSITIONS * HEAD_ELEMS) + 1


def is_exact(scenario: Scenario) -> bool:
    """Whether no sum of a layer can round, so that a split one has the bits of the whole."""
    return terms_max(scenario) <= 2 ** _SIGNIFICAND_BITS[scenario.model.dtype]


def splits_heads(scenario: Scenario) -> bool:
    """Whether each tensor-parallel rank gets whole heads."""
    return scenario.model.hidden % (HEAD_ELEMS * max(1, scenario.topology.tp)) == 0
