"""Adoption of a target's bits, if its own update rule depends on where tensors are cut.

[Note: adopted bits]
Vectorised loops compute their last elements differently. So an element's bits may depend on its
position in the tensor that the rule updates. The judge accepts the bits of any such tensor
(`reference.cuts`):

1. The owner decides. Master and state must come from the same tensor.
2. If a rank reports the working param first, its value is fixed. The owner's master must cast to
   it.
3. The decision holds for all other ranks and all later steps.
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
    """Adopts the system's bits in the reference's state, before a comparison.

    Args:
        source: The reference's steps.
    """

    def __init__(self, source: StepSource) -> None:
        self._source = source
        self._step = -1
        self._owned: dict[str, Tensor] = {}  # each 1D, bool
        """Mask of elements whose owner was observed in this step, by param."""
        self._cast: dict[str, Tensor] = {}  # each 1D, bool
        """Mask of elements whose working param was observed in this step, by param."""

    def see_part(self, part: OwnedPart, expected: ReferenceStep) -> bool:
        """Adopt bits before a part is compared.

        Args:
            part: Reported by its engine.
            expected: The step. Its masters, state and params change in place.

        Returns:
            False if the part can no longer be compared.
        """
        if not self._follows(expected):
            return True
        place = part.place
        name, span = place.param, slice(place.start, place.stop)
        owned, cast = self._seen(expected, name)
        whole = expected.masters[name]
        # The key "" stands for the master.
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
                # Master and state must fit together, and the master must cast to the working param
                # if another rank has reported it.
                held = same_as(shown, elems - place.start, values)
                now = same_elements(values[""].to(working.dtype), working[elems]).cpu()
                return held & (now | ~cast[elems])

            index = apart + place.start
            self._adopt(expected, name, index, cut.bits_elsewhere(index, holds=holds))
        owned[span] = True
        return self._source.uncertified_step is None

    def see_param(self, name: str, got: Tensor, expected: ReferenceStep) -> bool:
        """Adopt bits before a working param is compared.

        Args:
            name: Param name.
            got: Its values on a rank.
            expected: The step. Its masters, state and params change in place.

        Returns:
            False if the param can no longer be compared.
        """
        if not self._follows(expected) or name not in expected.masters:
            return True
        owned, cast = self._seen(expected, name)
        apart = elements_apart({"": expected.params[name].reshape(-1)}, {"": got.reshape(-1)})
        cut = self._cut_step(expected, name, apart, owned | cast)
        # Only the cast master is visible here, not master and state.
        if cut is not None and apart is not None:
            flat = got.reshape(-1)

            def holds(elems: Tensor, values: Values) -> Tensor:
                return same_elements(values[""].to(flat.dtype), flat[elems]).cpu()

            self._adopt(expected, name, apart, cut.bits_elsewhere(apart, holds=holds))
        # A rank has the whole working param, so all elements are decided.
        cast[:] = True
        return self._source.uncertified_step is None

    def _follows(self, expected: ReferenceStep) -> bool:
        # Only a target's own rule has bits that the reference cannot predict.
        return not expected.skipped and self._source.has_own_rule

    def _seen(self, expected: ReferenceStep, name: str) -> tuple[Tensor, Tensor]:
        # A decision is for one step. The next step starts from the adopted bits.
        if expected.step != self._step:
            self._step = expected.step
            self._owned.clear()
            self._cast.clear()
        # Masks of whole params, because several ranks' parts share them.
        new = torch.zeros(expected.masters[name].numel(), dtype=torch.bool)
        return self._owned.setdefault(name, new), self._cast.setdefault(name, new.clone())

    def _cut_step(
        self, expected: ReferenceStep, name: str, apart: Tensor | None, decided: Tensor
    ) -> CutStep | None:
        # If a differing element was decided before, the difference is a finding.
        if apart is None or not apart.numel() or bool(decided[apart].any()):
            return None
        return self._source.reference.cut_step(expected, name=name)

    def _adopt(
        self, expected: ReferenceStep, name: str, index: Tensor, values: Values | None
    ) -> None:
        if values is not None:
            self._source.adopt(expected.step, name, index, values)


def adopt_bits(follower: Follower, part: OwnedPart) -> None:
    """Adopt a part's bits, after its follower has stepped.

    Args:
        follower: Expected state of the part. Changes in place.
        part: Reported by its engine.
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
    """Return the indices of elements that differ in any key.

    Args:
        wanted: Expected tensors by key, 1D if they have a value per element.
        shown: The system's tensors by key.

    Returns:
        None if keys, dtypes or sizes differ.
    """
    elems = wanted[""].numel()
    apart = torch.zeros(elems, dtype=torch.bool)
    for key in wanted.keys() | shown.keys():
        one, other = wanted.get(key), shown.get(key)
        if one is None or other is None or one.dtype != other.dtype:
            return None
        if one.numel() != other.numel():
            return None
        # Skip counters and matrix factors, which have no value per element.
        if one.shape == apart.shape and not torch.equal(one, other):
            # Masks are on the CPU, but the system's tensors may be on another device.
            apart |= ~same_elements(one, other).cpu()
    return apart.nonzero().reshape(-1)


def same_as(shown: Values, elems: Tensor, values: Values) -> Tensor:
    """Return a mask of elements that have the given values in all keys.

    Args:
        shown: The system's tensors by key. # each 1D
        elems: Indices into these tensors. # 1D
        values: Values at these indices, by key. # each 1D
    """
    same = torch.ones_like(elems, dtype=torch.bool)
    for key, value in values.items():
        same &= same_elements(value, shown[key][elems]).cpu()
    return same
