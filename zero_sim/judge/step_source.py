"""Source of the steps that a group of ranks is expected to take, where the order is known.

The steps may come from elsewhere: from another process, or from an earlier case of a family. Where
they come from never changes what is found. At the first thing that does not agree, or that digests
do not cover, the group's own reference takes all steps so far, and goes on with them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from zero_sim.judge.judged_group import JudgedGroup
from zero_sim.judge.step_digests import StepDigests
from zero_sim.judge.trajectory import LateReference, frozen, placed_as
from zero_sim.reference import (
    POSITION_FREE,
    Addresses,
    BoundedStep,
    Orders,
    Reference,
    ReferenceStep,
    step_together,
)
from zero_sim.targets.adapt import PARTS

AnyStep = ReferenceStep | BoundedStep | StepDigests
_BY_ELEMENTS = ("params",)
"""Models that compute element by element, so that where params lie in memory changes no bits."""


class SharedSteps(Protocol):
    """Steps of references elsewhere, of all groups that share a norm."""

    @property
    def are_digests(self) -> bool:
        """True if they are digests, which are compared without a reference."""
        ...

    def find(
        self, step: int, *, placed: Hashable
    ) -> Sequence[ReferenceStep] | Sequence[StepDigests] | None:
        """Return a step, group by group; None if it has to be taken here.

        Args:
            step: Index of the step, from 0.
            placed: How params lie in memory, which can change the bits of a product.
        """
        ...

    def begin(self, step: int) -> None:
        """Note that a step is being taken here."""
        ...

    def keep(
        self, taken: Sequence[ReferenceStep], *, groups: Sequence[JudgedGroup], placed: Hashable
    ) -> None:
        """Keep a step that was taken here, for others."""
        ...

    def stop(self, step: int) -> None:
        """Keep no more steps, from this one on."""
        ...


class Steps:
    """Expected steps of one group of ranks, one after another; base of their sources."""

    steps_unseen = True
    """True if a step can be taken before the ranks were seen after the one before."""

    def __init__(self, *, uncertified_step: int | None = None) -> None:
        self.steps: dict[int, Any] = {}
        """Steps that were taken and that some rank is yet to be compared with, by index."""
        self.is_local = True
        """True once the group's own reference takes the steps."""
        self.uncertified_step = uncertified_step
        """Step from whose update on nothing is owed; None as long as all is."""
        self.peers: Sequence[Any] = (self,)
        """Those of all groups that share a norm."""
        self.on_step: Callable[[AnyStep], None] | None = None
        """Called with every step, once all peers have it."""

    @property
    def has_digests(self) -> bool:
        """True while steps are digests."""
        return False

    def follows(self, step: int) -> bool:
        """Return whether a step can be taken at all."""
        return True

    def start_from(self, params: Mapping[str, Tensor]) -> None:
        """Begin with start values that the system drew, before `set_addresses`.

        Args:
            params: The values by name.
        """
        raise NotImplementedError

    def set_addresses(self, addresses: Sequence[Addresses]) -> None:
        """Note where each rank's working params lie, before the first step.

        Args:
            addresses: By rank.
        """
        raise NotImplementedError

    def get(self, step: int, *, told: Tensor | None = None) -> AnyStep:
        """Return a step; the next one is taken if it was not yet.

        Args:
            step: Index of the step, from 0.
            told: Norm that a rank reports of it, 0-D fp32, for numerics that follow it.
        """
        if step not in self.steps:
            self.advance(told=told)
        return self.steps[step]

    def advance(self, *, told: Tensor | None = None) -> None:
        """Take the next step of all groups that share a norm."""
        raise NotImplementedError

    def fall_back(self) -> None:
        """Take all steps so far with the groups' own references, and go on with these."""

    def stop_sharing(self, step: int) -> None:
        """Let other processes take their own steps, from this one on."""

    def forget(self, step: int) -> None:
        """Forget a step that every rank was compared with."""
        self.steps.pop(step, None)


class StepSource(Steps):
    """Expected steps of a group whose order of addition is known.

    Args:
        group: The judged group, and what is known of it.
        reference: Its oracle, at the step before the first one; one that is late is built once a
            step is taken with it.
        order_seed: Seed of the world, from which orders are drawn.
        shared: Steps of references elsewhere; None to take all steps here.
    """

    def __init__(
        self,
        group: JudgedGroup,
        *,
        reference: Reference | LateReference,
        order_seed: int,
        shared: SharedSteps | None = None,
    ) -> None:
        is_certified = isinstance(reference, LateReference) or reference.certified
        super().__init__(uncertified_step=None if is_certified else group.first_step)
        self.is_local = shared is None
        self._group = group
        self._given = reference
        self._order_seed = order_seed
        self._shared = shared
        self._addresses: Sequence[Addresses] | None = None
        self._placed: Hashable = None
        self._next_step = group.first_step
        self.unfollowed = ""
        """Why no update is known from the uncertified step on, if not because of its norm."""

    @property
    def reference(self) -> Reference:
        """The group's own reference; it lags behind while steps come from elsewhere."""
        if isinstance(self._given, LateReference):
            self._given = self._given.build()
        return self._given

    @property
    def has_digests(self) -> bool:
        """True while steps are digests."""
        return self._shared is not None and self._shared.are_digests and not self.is_local

    def start_from(self, params: Mapping[str, Tensor]) -> None:
        """Begin with start values that the system drew; then no steps come from elsewhere."""
        self.reference.start_from(params)

    def set_addresses(self, addresses: Sequence[Addresses]) -> None:
        """Note where each rank's working params lie, before the first step."""
        by_elements = self._group.scenario.model.name in _BY_ELEMENTS
        self._addresses, self._placed = addresses, placed_as(None if by_elements else addresses)
        if self.is_local:
            self._place_params()

    def advance(self, *, told: Tensor | None = None) -> None:
        """Take the next step of all groups that share a norm."""
        step, shared, placed = self._next_step, self._shared, None
        if shared is not None:
            placed = tuple(each._placed for each in self.peers)
            found = None if self.is_local else shared.find(step, placed=placed)
            if found is not None:
                self._note(found)
                return
            shared.begin(step)
            self.fall_back()
        taken = self._take(told)
        if shared is not None:
            shared.keep(taken, groups=[each._group for each in self.peers], placed=placed)
        self._note(taken)

    def fall_back(self) -> None:
        """Take all steps so far with the groups' own references, and go on with these."""
        if self.is_local:
            return
        shown = [frozenset(each.steps) for each in self.peers]
        for each in self.peers:
            each.is_local = True
            each.steps.clear()
            if each._addresses is not None:
                each._place_params()
        for step in range(self._group.first_step, self._next_step):
            for each, own, steps in zip(self.peers, self._take(), shown, strict=True):
                if step in steps:
                    each.steps[step] = own

    def stop_sharing(self, step: int) -> None:
        """Let other processes take their own steps, from this one on."""
        if self._shared is not None:
            self._shared.stop(step)

    @property
    def has_own_rule(self) -> bool:
        """True if the reference steps by a rule of the target, here."""
        return self.is_local and self._group.scenario.optimizer.name == "own"

    def adopt(self, step: int, name: str, index: Tensor, values: Mapping[str, Tensor]) -> None:
        """Go on with other bits of the target's rule; arguments as for `Reference.adopt`."""
        if step + 1 == self._next_step:
            self.reference.adopt(name, index, values)
            return
        # Ranks that wait for none of the others: the reference has gone on without these.
        self.uncertified_step = step
        self.unfollowed = (
            "the bits of the target's rule depend on where a tensor is cut, and a rank was seen "
            "after others had gone on. Try world.timing = 'eager', or fewer ranks"
        )

    def _take(self, told: Tensor | None = None) -> Sequence[ReferenceStep]:
        """Take a step with the own references."""
        taken = step_together(
            [each.reference for each in self.peers],
            [each._prepare() for each in self.peers],
            order_seed=self._order_seed,
            told=told,
        )
        for each, own in zip(self.peers, taken, strict=True):
            each._note_certified(own)
        return taken

    def _prepare(self) -> Orders | None:
        """Save the steps that some rank has yet to see; return what the ring's order depends on."""
        for earlier, kept in self.steps.items():
            self.steps[earlier] = frozen(kept)
        if self._group.scenario.world.order in POSITION_FREE:
            return None
        return self._group.ownership.orders()

    def _note(self, taken: Sequence[ReferenceStep] | Sequence[StepDigests]) -> None:
        for each, own in zip(self.peers, taken, strict=True):
            each.steps[own.step] = own
            each._next_step = own.step + 1
            each._note_certified(own)
        for each, own in zip(self.peers, taken, strict=True):
            if each.on_step is not None:
                each.on_step(own)

    def _note_certified(self, taken: ReferenceStep | StepDigests) -> None:
        if not taken.clip_certified and self.uncertified_step is None:
            self.uncertified_step = taken.step
            self.unfollowed = taken.cut_dependence

    def _place_params(self) -> None:
        assert self._addresses is not None
        self.reference.set_addresses(self._addresses)
        self.reference.set_holdings(self._group.ownership.holdings)
        self.reference.sees_all = self._group.sees_all and PARTS not in self._group.unobserved
