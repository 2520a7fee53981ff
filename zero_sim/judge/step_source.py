"""Source of a group's expected steps, for a known order of addition.

Another process or an earlier case may share its steps. Sharing never changes findings: at the first
difference, or if digests are not enough, the group's own reference takes all steps so far and
continues.
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
"""Models that compute elementwise, so param addresses cannot change their bits."""


class SharedSteps(Protocol):
    """Steps of references elsewhere, for all groups that share a norm."""

    @property
    def are_digests(self) -> bool:
        """True if steps are digests, not tensors."""
        ...

    def find(
        self, step: int, *, placed: Hashable
    ) -> Sequence[ReferenceStep] | Sequence[StepDigests] | None:
        """Return each group's step, or None if it must be taken here.

        Args:
            step: Counted from 0.
            placed: Param addresses, because alignment can change the bits of a matrix product.
        """
        ...

    def begin(self, step: int) -> None:
        """Record that a step is being taken here."""
        ...

    def keep(
        self, taken: Sequence[ReferenceStep], *, groups: Sequence[JudgedGroup], placed: Hashable
    ) -> None:
        """Keep a step that was taken here, for other processes or cases."""
        ...

    def stop(self, step: int) -> None:
        """Stop sharing, from this step on."""
        ...


class Steps:
    """Expected steps of a group, in order. Base class of all sources."""

    steps_unseen = True
    """True if a step can be taken without observing the ranks after the previous step."""

    def __init__(self, *, uncertified_step: int | None = None) -> None:
        self.steps: dict[int, Any] = {}
        """Taken steps that some rank was not yet compared with, by index."""
        self.is_local = True
        """True if the group's own reference takes the steps."""
        self.uncertified_step = uncertified_step
        """First step whose update cannot be predicted; None without such a step."""
        self.peers: Sequence[Any] = (self,)
        """Steps of all groups that share a norm, including this group."""
        self.on_step: Callable[[AnyStep], None] | None = None
        """Called with each step, once all peers have it."""

    @property
    def has_digests(self) -> bool:
        """True while steps are digests."""
        return False

    def follows(self, step: int) -> bool:
        """Return True if a step can be taken."""
        return True

    def start_from(self, params: Mapping[str, Tensor]) -> None:
        """Start from values that the system drew. Call this before `set_addresses`.

        Args:
            params: Values by name.
        """
        raise NotImplementedError

    def set_addresses(self, addresses: Sequence[Addresses]) -> None:
        """Set the addresses of each rank's working params, before the first step.

        Args:
            addresses: Addresses by rank.
        """
        raise NotImplementedError

    def get(self, step: int, *, reported_norm: Tensor | None = None) -> AnyStep:
        """Return a step, and take it first if needed.

        Args:
            step: Counted from 0.
            reported_norm: Norm reported by a rank, for norm = "reported" only. # 0D, fp32
        """
        # The first rank to need a step takes it for all ranks.
        if step not in self.steps:
            self.advance(reported_norm=reported_norm)
        return self.steps[step]

    def advance(self, *, reported_norm: Tensor | None = None) -> None:
        """Take the next step of all groups that share a norm."""
        raise NotImplementedError

    def fall_back(self) -> None:
        """Take all steps so far with the groups' own references, and continue with these."""

    def stop_sharing(self, step: int) -> None:
        """Stop sharing steps with other processes, from this step on."""

    def forget(self, step: int) -> None:
        """Drop a step after all ranks were compared."""
        self.steps.pop(step, None)


class StepSource(Steps):
    """Expected steps of a group with a known order of addition.

    Args:
        group: The judged group.
        reference: Its oracle, before the first step. A late reference is built when first needed.
        order_seed: World seed, from which orders are drawn.
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
        # A late reference has not taken a step yet, so nothing is uncertified.
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
        """Reason for `uncertified_step`; empty if it is the norm."""

    @property
    def reference(self) -> Reference:
        """The group's own reference. While steps are shared, it stays before the first step."""
        if isinstance(self._given, LateReference):
            self._given = self._given.build()
        return self._given

    @property
    def has_digests(self) -> bool:
        """True while steps are digests."""
        return self._shared is not None and self._shared.are_digests and not self.is_local

    def start_from(self, params: Mapping[str, Tensor]) -> None:
        """Start from values that the system drew. Such cases do not share steps."""
        self.reference.start_from(params)

    def set_addresses(self, addresses: Sequence[Addresses]) -> None:
        """Set the addresses of each rank's working params, before the first step."""
        by_elements = self._group.scenario.model.name in _BY_ELEMENTS
        self._addresses, self._placed = addresses, placed_as(None if by_elements else addresses)
        if self.is_local:
            # While steps are shared, avoid building the reference.
            self._place_params()

    def advance(self, *, reported_norm: Tensor | None = None) -> None:
        """Take the next step of all groups that share a norm."""
        step, shared, placed = self._next_step, self._shared, None
        if shared is not None:
            placed = tuple(each._placed for each in self.peers)
            # Bits may depend on param addresses, so a shared step must have equal addresses.
            found = None if self.is_local else shared.find(step, placed=placed)
            if found is not None:
                self._note(found)
                return
            shared.begin(step)
            # Take this and all later steps here.
            self.fall_back()
        taken = self._take(reported_norm)
        if shared is not None:
            shared.keep(taken, groups=[each._group for each in self.peers], placed=placed)
        self._note(taken)

    def fall_back(self) -> None:
        """Take all steps so far with the groups' own references, and continue with these."""
        if self.is_local:
            return
        # Peers step together, so all of them fall back together.
        shown = [frozenset(each.steps) for each in self.peers]
        for each in self.peers:
            each.is_local = True
            each.steps.clear()
            if each._addresses is not None:
                each._place_params()
        for step in range(self._group.first_step, self._next_step):
            for each, own, steps in zip(self.peers, self._take(), shown, strict=True):
                # Drop steps that all ranks were compared with.
                if step in steps:
                    each.steps[step] = own

    def stop_sharing(self, step: int) -> None:
        """Stop sharing steps with other processes, from this step on."""
        if self._shared is not None:
            self._shared.stop(step)

    @property
    def has_own_rule(self) -> bool:
        """True if the group's own reference steps by the target's update rule."""
        return self.is_local and self._group.scenario.optimizer.name == "own"

    def adopt(self, step: int, name: str, index: Tensor, values: Mapping[str, Tensor]) -> None:
        """Adopt other bits of the target's rule; arguments as for `Reference.adopt`."""
        if step + 1 == self._next_step:
            # The reference has not taken the next step, so its state can still change.
            self.reference.adopt(name, index, values)
            return
        # Another rank has gone on, so the next step used the old bits.
        self.uncertified_step = step
        self.unfollowed = (
            "the bits of the target's rule depend on where a tensor is cut, and a rank was "
            "observed after others had continued. Set world.timing = 'eager', or use fewer ranks"
        )

    def _take(self, reported_norm: Tensor | None = None) -> Sequence[ReferenceStep]:
        """Take a step with the peers' own references."""
        taken = step_together(
            [each.reference for each in self.peers],
            [each._prepare() for each in self.peers],
            order_seed=self._order_seed,
            reported_norm=reported_norm,
        )
        for each, own in zip(self.peers, taken, strict=True):
            each._note_certified(own)
        return taken

    def _prepare(self) -> Orders | None:
        """Freeze steps that are still needed; return element positions in the sums."""
        # The reference overwrites its tensors in the next step.
        for earlier, kept in self.steps.items():
            self.steps[earlier] = frozen(kept)
        # These orders treat all elements alike, so positions are not needed.
        if self._group.scenario.world.order in POSITION_FREE:
            return None
        return self._group.ownership.orders()

    def _note(self, taken: Sequence[ReferenceStep] | Sequence[StepDigests]) -> None:
        for each, own in zip(self.peers, taken, strict=True):
            each.steps[own.step] = own
            each._next_step = own.step + 1
            each._note_certified(own)
        # In a second loop, because `on_step` requires that all peers have the step.
        for each, own in zip(self.peers, taken, strict=True):
            if each.on_step is not None:
                each.on_step(own)

    def _note_certified(self, taken: ReferenceStep | StepDigests) -> None:
        if not taken.clip_certified and self.uncertified_step is None:
            # Keep the first such step, because no later step can be predicted either.
            self.uncertified_step = taken.step
            self.unfollowed = taken.cut_dependence

    def _place_params(self) -> None:
        assert self._addresses is not None
        self.reference.set_addresses(self._addresses)
        self.reference.set_holdings(self._group.ownership.holdings)
        # Bits can only be adopted if the masters and state of all ranks are observed.
        self.reference.sees_all = self._group.sees_all and PARTS not in self._group.unobserved
