"""Trajectories: steps that a reference took, kept for other systems that owe the same.

A family of cases has one model, data and optimizer, and many systems. Whatever its bits follow from
is the same for all of them, so that the steps of the first one's reference judge the others too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from zero_sim.reference import Addresses, Reference, ReferenceStep

_KEPT_MAX = 8
"""Trajectories of as many references; those of a family that is over are not asked for again."""


def frozen(step: ReferenceStep) -> ReferenceStep:
    """A copy that survives the reference's next step.

    Args:
        step: As the reference has just taken it.
    """

    def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in tensors.items()}

    return replace(
        step,
        grads=copied(step.grads),
        masters=copied(step.masters),
        params=copied(step.params),
        scales=copied(step.scales),
        stepped=copied(step.stepped),
        state={name: copied(state) for name, state in step.state.items()},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LateReference:
    """A reference that is built once a step is to be taken with it, which may be never."""

    build: Callable[[], Reference]
    held: Sequence[frozenset[str]]
    """As of the reference."""


@dataclass(slots=True)
class Trajectory:
    """The steps of the references of all groups of a case that share a norm."""

    held: dict[int, Sequence[frozenset[str]]] = field(default_factory=dict)
    """By number of the group, for every rank of it the names of the params that it holds; of groups
    that had a reference."""
    _steps: dict[tuple[Hashable, int], Sequence[ReferenceStep]] = field(default_factory=dict)

    are_digests: bool = field(default=False, init=False)

    def find(self, step: int, *, placed: Hashable) -> Sequence[ReferenceStep] | None:
        """Return a step, group by group; None if no reference took it."""
        return self._steps.get((placed, step))

    def begin(self, step: int) -> None:
        """Do nothing: cases come one after another."""

    def stop(self, step: int) -> None:
        """Do nothing: steps of a broken system's reference are as good as any."""

    def keep(self, taken: Sequence[ReferenceStep], *, groups: object, placed: Hashable) -> None:
        """Keep a step without what only explains findings: who has one computes it anew."""
        bare = [replace(frozen(each), start=None) for each in taken]
        self._steps.setdefault((placed, taken[0].step), bare)


class Trajectories:
    """The last few trajectories of this process, by what their references compute from."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[Hashable, Trajectory] = OrderedDict()

    def of(self, key: Hashable) -> Trajectory:
        """The trajectory of all references that compute from the same; a new one at first.

        Args:
            key: What they compute from.
        """
        found = self._by_key.setdefault(key, Trajectory())
        self._by_key.move_to_end(key)
        if len(self._by_key) > _KEPT_MAX:
            self._by_key.popitem(last=False)
        return found


def placed_as(addresses: Sequence[Addresses] | None) -> Hashable:
    """How the params of a group's ranks lie in memory, to be compared with how others' do.

    Args:
        addresses: By rank; None where that changes no bits.
    """
    return None if addresses is None else tuple(frozenset(each.items()) for each in addresses)
