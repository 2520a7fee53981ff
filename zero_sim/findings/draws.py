"""Statistical test: is a param a changed copy of a random draw, or an independent draw?

[Note: neighbours among two draws]
Sort the 2n values of both tensors together. An element is a *pair* if its two values are
neighbours. In two independent draws from one distribution, all pairings of the 2n values are
equally likely. So k given neighbours are all pairs with probability
1 / ((2n - 1)(2n - 3) ... (2n - 2k + 1)), and there are C(2n - k, k) ways to choose them. The
product bounds the probability of k or more pairs: at most 1/k!, for any distribution. In a slightly
scaled or shifted copy, nearly all elements are pairs. Equal values do not count, because rows of
zeros are not drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

FALSE_ALARM = 1e-8
"""Largest probability of mistaking an independent draw for a changed copy."""


def is_changed_draw(expected: Tensor, got: Tensor) -> bool:
    """Return True if values are a changed copy of the expected draw, not an independent draw.

    Args:
        expected: The param's start values in another run.
        got: Same shape, with at least one different value.
    """
    elems = expected.numel()
    if elems > 1 and bool((expected == expected.reshape(-1)[0]).all()):
        return True  # Constants, such as ones or zeros, are not drawn.
    # Shuffle, so that ties do not sort by element. The seed makes the result reproducible.
    places = torch.randperm(2 * elems, generator=torch.Generator().manual_seed(0))
    values, order = torch.cat([expected.reshape(-1), got.reshape(-1)])[places].sort(stable=True)
    # [2 * elems]: element index of each sorted value.
    owners = places[order] % elems
    is_pair = (owners[1:] == owners[:-1]) & (values[1:] != values[:-1])
    return neighbours_probability(elems, int(is_pair.sum())) <= FALSE_ALARM


def neighbours_probability(elems: int, count: int) -> float:
    """Bound the probability of `count` or more pairs in two independent draws.

    Args:
        elems: Length of each draw.
        count: Number of pairs; see [Note: neighbours among two draws].
    """
    bound = 1.0
    # Factor by factor, because C(2n - k, k) overflows at real param sizes.
    for index in range(count):
        ways = (2 * elems - count - index) / (index + 1)
        bound *= ways / (2 * elems - 1 - 2 * index)
        if not bound:
            break  # Underflow: no further factor can change it.
    return min(bound, 1.0)
