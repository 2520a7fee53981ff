"""Test whether a param is a changed draw or an unrelated one.

[Note: neighbours among two draws]
Sort the values of both tensors together. If both are independent draws from one distribution, all
ways to pair the 2n values are equally likely. So k given pairs of neighbours belong to one element
each with probability 1 / ((2n - 1)(2n - 3) ... (2n - 2k + 1)). There are C(2n - k, k) ways to
choose k pairs of neighbours. The product bounds the probability that k or more elements have their
two values next to each other: at most 1/k!, for any distribution. In a slightly scaled or shifted
draw, nearly all elements do. Equal values are not counted, because rows of zeros are no draw.
"""

from __future__ import annotations

import torch
from torch import Tensor

FALSE_ALARM = 1e-8
"""Largest probability of taking an independent draw for a changed one."""


def is_changed_draw(expected: Tensor, got: Tensor) -> bool:
    """Return True if a param's values are a changed copy of the expected ones, not another draw.

    Args:
        expected: Start values of the param in another run.
        got: Values of the same shape, at least one different.
    """
    elems = expected.numel()
    if elems > 1 and bool((expected == expected.reshape(-1)[0]).all()):
        return True  # Constants, such as ones or zeros, are not drawn.
    # Shuffle, so that the order of equal values is independent of their elements. Seeded, so that
    # the result is reproducible.
    places = torch.randperm(2 * elems, generator=torch.Generator().manual_seed(0))
    values, order = torch.cat([expected.reshape(-1), got.reshape(-1)])[places].sort(stable=True)
    # Index of the element that each sorted value belongs to.  # [2 * elems]
    owners = places[order] % elems
    is_pair = (owners[1:] == owners[:-1]) & (values[1:] != values[:-1])
    return neighbours_probability(elems, int(is_pair.sum())) <= FALSE_ALARM


def neighbours_probability(elems: int, count: int) -> float:
    """Bound the probability of `count` or more neighbours in two independent draws.

    Args:
        elems: Elements of each draw.
        count: Elements whose two values are adjacent in the joint order.
    """
    bound = 1.0
    # Factor by factor, because C(2n - k, k) overflows for real params.
    for index in range(count):
        ways = (2 * elems - count - index) / (index + 1)
        bound *= ways / (2 * elems - 1 - 2 * index)
        if not bound:
            break  # Underflow: no further factor can change it.
    return min(bound, 1.0)
