"""Bits that a target's elementwise rule gives a system, where a loop ends elsewhere than here.

[Note: which bits are adopted]
An element may have the bits of the rule in any tensor (`reference.cuts`). Its owner decides: master
and state have to be of one such tensor. A rank that shows the working param earlier decides its
value, to which the owner's has to cast. All others, and all later steps, are held to that.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from zero_sim.judge.judged_group import cut_state
from zero_sim.judge.step_source import StepSource
from zero_sim.reference import Follower, ReferenceStep, same_elements
from zero_sim.reference.cuts import CutStep
from zero_sim.targets import OwnedPart

Values = Mapping[str, Tensor]  # each 1D


class Adoption:
    """Lets a reference go on with the bits of a system.

    Args:
        source: Steps of the reference.
    """

    def __init__(self, source: StepSource) -> None:
        self._source = source
        self._step = -1
        self._owned: dict[str, Tensor] = {}  # each 1D, bool
        """By param: elements whose owner was seen in this step."""
        self._cast: dict[str, Tensor] = {}  # each 1D, bool
        """By param: elements whose working param was seen in this step."""

    def see_part(self, part: OwnedPart, expected: ReferenceStep) -> bool:
        """Adopt bits before a part is compared; False if it cannot be compared after that.

        Args:
            part: As its engine shows it.
            expected: The step; its masters, state and params change.
        """
        if not self._follows(expected):
            return True
        place = part.place
        name, span = place.param, slice(place.start, place.stop)
        owned, cast = self._seen(expected, name)
        whole = expected.masters[name]
        wanted = {"": whole.reshape(-1)[span]} | {
            key: cut_state(value, master=whole, start=place.start, stop=place.stop)
            for key, value in expected.state[name].items()
        }
        shown = {"": part.master, **part.state}
        apart = elements_apart(wanted, shown)
        cut = self._cut_step(expected, name, apart, owned[span])
        if cut is not None and apart is not None:
            working = expected.params[name].reshape(-1)

            def holds(elems: Tensor, values: Values) -> Tensor:
                held = same_as(shown, elems - place.start, values)
                now = same_elements(values[""].to(working.dtype), working[elems]).cpu()
                return held & (now | ~cast[elems])

            index = apart + place.start
            self._adopt(expected, name, index, cut.bits_elsewhere(index, holds=holds))
        owned[span] = True
        return self._source.uncertified_step is None

    def see_param(self, name: str, got: Tensor, expected: ReferenceStep) -> bool:
        """Adopt bits before a working param is compared; False if it cannot be after that.

        Args:
            name: Of the param.
            got: As a rank has it.
            expected: The step; its masters, state and params change.
        """
        if not self._follows(expected) or name not in expected.masters:
            return True
        owned, cast = self._seen(expected, name)
        apart = elements_apart({"": expected.params[name].reshape(-1)}, {"": got.reshape(-1)})
        cut = self._cut_step(expected, name, apart, owned | cast)
        if cut is not None and apart is not None:
            flat = got.reshape(-1)

            def holds(elems: Tensor, values: Values) -> Tensor:
                return same_elements(values[""].to(flat.dtype), flat[elems]).cpu()

            self._adopt(expected, name, apart, cut.bits_elsewhere(apart, holds=holds))
        cast[:] = True
        return self._source.uncertified_step is None

    def _follows(self, expected: ReferenceStep) -> bool:
        return not expected.skipped and self._source.has_own_rule

    def _seen(self, expected: ReferenceStep, name: str) -> tuple[Tensor, Tensor]:
        if expected.step != self._step:
            self._step = expected.step
            self._owned.clear()
            self._cast.clear()
        new = torch.zeros(expected.masters[name].numel(), dtype=torch.bool)
        return self._owned.setdefault(name, new), self._cast.setdefault(name, new.clone())

    def _cut_step(
        self, expected: ReferenceStep, name: str, apart: Tensor | None, decided: Tensor
    ) -> CutStep | None:
        if apart is None or not apart.numel() or bool(decided[apart].any()):
            return None
        return self._source.reference.cut_step(expected, name=name)

    def _adopt(
        self, expected: ReferenceStep, name: str, index: Tensor, values: Values | None
    ) -> None:
        if values is not None:
            self._source.adopt(expected.step, name, index, values)


def adopt_bits(follower: Follower, part: OwnedPart) -> None:
    """Adopt bits of a part that a follower has just stepped.

    Args:
        follower: It may change.
        part: As its engine shows it.
    """
    shown = {"": part.master, **part.state}
    apart = elements_apart({"": follower.master, **follower.state}, shown)
    cut = follower.cut_step
    if cut is None or apart is None or not apart.numel():
        return
    found = cut.bits_elsewhere(apart, holds=lambda elems, values: same_as(shown, elems, values))
    if found is not None:
        follower.adopt(apart, found)


def elements_apart(wanted: Values, shown: Values) -> Tensor | None:
    """Return which elements differ in any key, 1D; None if something else differs.

    Args:
        wanted: As expected, 1D, or for what no element has its own of any shape.
        shown: As a system has it.
    """
    elems = wanted[""].numel()
    apart = torch.zeros(elems, dtype=torch.bool)
    for key in wanted.keys() | shown.keys():
        one, other = wanted.get(key), shown.get(key)
        if one is None or other is None or one.dtype != other.dtype:
            return None
        if one.numel() != other.numel():
            return None
        if one.shape == apart.shape and not torch.equal(one, other):
            apart |= ~same_elements(one, other).cpu()
    return apart.nonzero().reshape(-1)


def same_as(shown: Values, elems: Tensor, values: Values) -> Tensor:
    """Return which elements have given values in all keys.

    Args:
        shown: As a system has it, 1D.
        elems: 1D, elements of it.
        values: For these.
    """
    same = torch.ones_like(elems, dtype=torch.bool)
    for key, value in values.items():
        same &= same_elements(value, shown[key][elems]).cpu()
    return same
