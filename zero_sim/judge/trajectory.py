"""Trajectories: steps of a reference, kept to judge later cases of the same family."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from zero_sim.reference import Addresses, Reference, ReferenceStep

_KEPT_MAX = 8
"""Number of trajectories to keep. Finished families are not requested again."""


def frozen(step: ReferenceStep) -> ReferenceStep:
    """Copy a step, so that the reference's next step does not overwrite it.

    Args:
        step: The reference's last step.
    """

    def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in tensors.items()}

    # Only these tensors are updated in place.
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
    """A reference that is built when first needed."""

    build: Callable[[], Reference]
    held: Sequence[frozenset[str]]
    """As in `Reference`."""


@dataclass(slots=True)
class Trajectory:
    """Steps of all groups that share a norm; implements `SharedSteps`."""

    held: dict[int, Sequence[frozenset[str]]] = field(default_factory=dict)
    """Names of the params that each rank holds, by group number, for groups with a reference."""
    _steps: dict[tuple[Hashable, int], Sequence[ReferenceStep]] = field(default_factory=dict)

    are_digests: bool = field(default=False, init=False)

    def find(self, step: int, *, placed: Hashable) -> Sequence[ReferenceStep] | None:
        """Return each group's step, or None if it was not kept."""
        return self._steps.get((placed, step))

    def begin(self, step: int) -> None:
        """Do nothing, because cases run one after another."""

    def stop(self, step: int) -> None:
        """Do nothing, because steps of the reference stay right if the system is wrong."""

    def keep(self, taken: Sequence[ReferenceStep], *, groups: object, placed: Hashable) -> None:
        """Keep a step for later cases."""
        # Without the start state: a case with a finding falls back, so it computes the state anew.
        bare = [replace(frozen(each), start=None) for each in taken]
        # Equal inputs give equal steps, so keep the first.
        self._steps.setdefault((placed, taken[0].step), bare)


class Trajectories:
    """The most recent trajectories in this process, by their references' inputs."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[Hashable, Trajectory] = OrderedDict()

    def of(self, key: Hashable) -> Trajectory:
        """Return the trajectory of a key; create it if there is none.

        Args:
            key: All inputs of the reference.
        """
        # With equal inputs, a reference takes equal steps, so one trajectory judges all systems.
        found = self._by_key.setdefault(key, Trajectory())
        self._by_key.move_to_end(key)
        # Drop the least recently used.
        if len(self._by_key) > _KEPT_MAX:
            self._by_key.popitem(last=False)
        return found


def placed_as(addresses: Sequence[Addresses] | None) -> Hashable:
    """Return a hashable key for a group's param addresses.

    Args:
        addresses: Addresses by rank; None if bits do not depend on them.
    """
    # Sets, because the order of a dict must not matter.
    return None if addresses is None else tuple(frozenset(each.items()) for each in addresses)
