"""The smallest case known that finds each mutant: what shrinking it must come to.

Each is the least of what several campaigns with different seeds came to, and why it is not less can
be said of most. What concerns ranks, such as a shard's border, a sum or a group, needs two of them,
and a border two elements on either side of which there is a rank; what concerns buckets needs two,
and so two params, or one that just fills one; what is carried over needs two steps; what lies in
wait for a rank without elements needs a single one on two ranks. S02 and S03 need three ranks,
since a division by two rounds nothing; M95 eleven, since "10" sorts before "9" and "1" before
"10"; M65 and G01 four, two groups of two. Features are what the mutant itself speaks of: copies,
micro-batches, clipping, a checkpoint. Where a mutant is about a kind of param that only a network
has, such as tied, unused or expert ones, the minimum is that network.
"""

from __future__ import annotations

from zero_sim.shrink import Size

_NUMBERS = {
    # Faults of where things lie: padding, shards, fragments, and params that are tied or absent.
    "M01": (1, 2, 2, 1, 2),
    "M03": (1, 2, 2, 1, 2),
    "M05": (2, 1, 2, 1, 0),
    "M07": (1, 1, 1, 1, 1),
    "M09": (2, 1, 1, 1, 1),
    "M11": (1, 10, 114, 1, 1),
    "L01": (2, 1, 2, 1, 0),
    "L02": (2, 1, 1, 1, 1),
    "L03": (1, 1, 1, 1, 1),
    "L04": (1, 1, 1, 1, 1),
    "L05": (1, 2, 2, 1, 0),
    "L06": (2, 1, 2, 1, 0),
    "L07": (1, 1, 1, 1, 1),
    "L08": (1, 1, 1, 1, 1),
    "M19": (1, 10, 114, 1, 1),
    "M21": (1, 10, 114, 1, 1),
    "T01": (1, 10, 114, 1, 1),
    "T02": (1, 10, 114, 1, 1),
    "T03": (1, 10, 114, 1, 1),
    "M23": (1, 2, 2, 1, 1),
    "M25": (1, 10, 114, 1, 1),
    "M27": (1, 10, 114, 1, 4),
    "E01": (1, 10, 114, 1, 1),
    "E02": (1, 1, 1, 2, 1),
    "E03": (2, 1, 1, 1, 0),
    "E04": (2, 1, 1, 1, 0),
    "E05": (2, 1, 1, 1, 0),
    # Faults of buckets, divisors and accumulation.
    "M13": (1, 1, 1, 1, 1),
    "M15": (1, 2, 3, 1, 2),
    "B01": (1, 2, 2, 1, 2),
    "M29": (2, 1, 1, 1, 1),
    "M31": (2, 1, 1, 1, 1),
    "M33": (1, 1, 1, 1, 2),
    "S03": (3, 1, 1, 1, 0),
    "M37": (1, 1, 1, 1, 1),
    "M39": (2, 1, 1, 1, 1),
    "M43": (2, 1, 1, 1, 3),
    "A01": (1, 1, 1, 1, 2),
    # Faults of time and of identity: waits, stale views, groups, and the order of collectives.
    "M45": (1, 1, 1, 1, 1),
    "M47": (1, 2, 2, 1, 2),
    "M53": (1, 1, 1, 2, 1),
    "Z02": (1, 1, 1, 1, 1),
    "M61": (2, 1, 1, 1, 1),
    "M63": (2, 1, 1, 1, 1),
    "M65": (4, 1, 1, 1, 1),
    "O01": (2, 2, 2, 1, 2),
    # Faults of the step: norm, clipping, overflow, optimizer state and dtypes.
    "M69": (1, 1, 1, 1, 0),
    "M73": (1, 1, 1, 1, 1),
    "M75": (2, 1, 1, 1, 2),
    "N01": (2, 1, 1, 1, 1),
    "I01": (2, 1, 1, 2, 2),
    "P01": (1, 2, 1, 1, 2),
    "D01": (1, 1, 1, 1, 1),
    # Faults of saving and loading.
    "M93": (1, 2, 3, 2, 3),
    "M97": (1, 1, 1, 2, 2),
    "M99": (2, 1, 1, 2, 1),
    "C01": (1, 1, 1, 2, 1),
    # Faults that cost time or memory and change no number.
    "M111": (1, 1, 1, 1, 0),
    "V02": (1, 1, 1, 1, 1),
}
"""Ranks, params, elements, steps, features."""

MINIMA = {
    id: Size(ranks=ranks, params=params, elements=elements, steps=steps, features=features)
    for id, (ranks, params, elements, steps, features) in _NUMBERS.items()
}
"""By id of the mutant."""
