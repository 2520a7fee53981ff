"""Trajectories: steps that a reference took, kept for other systems with the same expectations.

A family of cases has one model, data and optimizer, and many systems. If everything that determines
the bits is equal, the steps of the first case's reference also judge the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from zero_sim.reference import Addresses, Reference, ReferenceStep

_KEPT_MAX = 8
"""Number of trajectories that are kept. Finished families are not requested again."""


def frozen(step: ReferenceStep) -> ReferenceStep:
    """Return a copy of a step that the reference's next step does not overwrite.

    Args:
        step: The step as the reference has just taken it.
    """

    def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in tensors.items()}

    # Only tensors that the reference updates in place.
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
    """A reference that is built when first needed, which may be never."""

    build: Callable[[], Reference]
    held: Sequence[frozenset[str]]
    """As in the reference."""


@dataclass(slots=True)
class Trajectory:
    """Steps of the references of all groups of a case that share a norm."""

    held: dict[int, Sequence[frozenset[str]]] = field(default_factory=dict)
    """Names of the params that each rank holds, by number of the group; for groups with a
    reference."""
    _steps: dict[tuple[Hashable, int], Sequence[ReferenceStep]] = field(default_factory=dict)

    # Part of `SharedSteps`: whole tensors, not digests.
    are_digests: bool = field(default=False, init=False)

    def find(self, step: int, *, placed: Hashable) -> Sequence[ReferenceStep] | None:
        """Return a step of each group; None if no reference took it."""
        return self._steps.get((placed, step))

    def begin(self, step: int) -> None:
        """Do nothing: cases run one after another."""

    def stop(self, step: int) -> None:
        """Do nothing: the reference's steps are right even if the system is broken."""

    def keep(self, taken: Sequence[ReferenceStep], *, groups: object, placed: Hashable) -> None:
        """Keep a step, without the start state: cases that explain a finding compute it anew."""
        bare = [replace(frozen(each), start=None) for each in taken]
        # Equal inputs give equal steps, so the first is as good as any.
        self._steps.setdefault((placed, taken[0].step), bare)


class Trajectories:
    """The most recent trajectories of this process, by inputs of their references."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[Hashable, Trajectory] = OrderedDict()

    def of(self, key: Hashable) -> Trajectory:
        """Return the trajectory for equal inputs of a reference; a new one if there is none.

        Args:
            key: Everything that the reference computes from.
        """
        # Drop the least recently used.
        found = self._by_key.setdefault(key, Trajectory())
        self._by_key.move_to_end(key)
        if len(self._by_key) > _KEPT_MAX:
            self._by_key.popitem(last=False)
        return found


def placed_as(addresses: Sequence[Addresses] | None) -> Hashable:
    """Return a key for the addresses of a group's params, to compare with other runs.

    Args:
        addresses: Addresses by rank; None if they change no bits.
    """
    # Sets, because the order of params in a dict changes no bits.
    return None if addresses is None else tuple(frozenset(each.items()) for each in addresses)
