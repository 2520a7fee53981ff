"""Tests whether a param is a changed draw or another one.

[Note: neighbours among two draws]
Sort both tensors' values together. If both are draws from one distribution, each way to pair
the 2n values is equally likely, so k given pairs of neighbours belong to one element each with
probability 1 / ((2n - 1)(2n - 3) ... (2n - 2k + 1)). There are C(2n - k, k) ways to choose k pairs
of neighbours, and the product bounds the probability that k or more elements have their two values
next to each other: at most 1/k!, whatever the distribution. Of a draw that was scaled or shifted
slightly nearly all elements do. Equal values are not counted: rows of zeros are no draw.
"""

from __future__ import annotations

import torch
from torch import Tensor

FALSE_ALARM = 1e-8
"""Largest probability with which a param's own draw is taken for a changed one."""


def is_changed_draw(expected: Tensor, got: Tensor) -> bool:
    """True if a param's values are those expected but for a change, and no other draw.

    Args:
        expected: Values that it starts with in another run.
        got: Values of the same shape, some of them different.
    """
    elems = expected.numel()
    if elems > 1 and bool((expected == expected.reshape(-1)[0]).all()):
        return True  # Ones or zeros, which are not drawn.
    # Shuffled, so that the order of equal values does not depend on their elements.
    places = torch.randperm(2 * elems, generator=torch.Generator().manual_seed(0))
    values, order = torch.cat([expected.reshape(-1), got.reshape(-1)])[places].sort(stable=True)
    owners = places[order] % elems
    is_pair = (owners[1:] == owners[:-1]) & (values[1:] != values[:-1])
    return neighbours_probability(elems, int(is_pair.sum())) <= FALSE_ALARM


def neighbours_probability(elems: int, count: int) -> float:
    """Bound the probability that so many elements are neighbours in two draws.

    Args:
        elems: Elements in each draw.
        count: Elements whose two values are neighbours when all values are sorted.
    """
    bound = 1.0
    for index in range(count):
        ways = (2 * elems - count - index) / (index + 1)
        bound *= ways / (2 * elems - 1 - 2 * index)
        if not bound:
            break
    return min(bound, 1.0)
