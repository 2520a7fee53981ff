"""Adoption of other bits of a target's elementwise rule, which depend on the ends of its loops.

[Note: adopted bits]
Vectorised loops compute their last elements differently, so the bits of an element depend on the
tensor that contains it. An element may have the rule's bits in any tensor (`reference.cuts`):

1. Its owner decides; master and state must have the bits of a single such tensor.
2. If a rank reports the working param earlier, that fixes its value. The owner's master must then
   cast to it.
3. All other ranks and all later steps are compared with the decision.
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
    """Adopts bits of the system in the reference's state, before a comparison.

    Args:
        source: Steps of the reference.
    """

    def __init__(self, source: StepSource) -> None:
        self._source = source
        self._step = -1
        self._owned: dict[str, Tensor] = {}  # each 1D, bool
        """Elements whose owner was observed in this step, by param."""
        self._cast: dict[str, Tensor] = {}  # each 1D, bool
        """Elements whose working param was observed in this step, by param."""

    def see_part(self, part: OwnedPart, expected: ReferenceStep) -> bool:
        """Adopt bits before a part is compared; return False if it can no longer be compared.

        Args:
            part: The part, as reported by its engine.
            expected: The step; its masters, state and params change.
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
        # All tensors of the part must have the bits of one cut.
        shown = {"": part.master, **part.state}
        apart = elements_apart(wanted, shown)
        cut = self._cut_step(expected, name, apart, owned[span])
        if cut is not None and apart is not None:
            working = expected.params[name].reshape(-1)

            def holds(elems: Tensor, values: Values) -> Tensor:
                # The owner must agree with itself in all keys, and with a rank observed earlier.
                held = same_as(shown, elems - place.start, values)
                now = same_elements(values[""].to(working.dtype), working[elems]).cpu()
                return held & (now | ~cast[elems])

            index = apart + place.start
            self._adopt(expected, name, index, cut.bits_elsewhere(index, holds=holds))
        owned[span] = True
        return self._source.uncertified_step is None

    def see_param(self, name: str, got: Tensor, expected: ReferenceStep) -> bool:
        """Adopt bits before a working param is compared; return False if it no longer can be.

        Args:
            name: Name of the param.
            got: Its values on some rank.
            expected: The step; its masters, state and params change.
        """
        if not self._follows(expected) or name not in expected.masters:
            return True
        owned, cast = self._seen(expected, name)
        apart = elements_apart({"": expected.params[name].reshape(-1)}, {"": got.reshape(-1)})
        cut = self._cut_step(expected, name, apart, owned | cast)
        # Only the cast of the master is visible here, not master and state.
        if cut is not None and apart is not None:
            flat = got.reshape(-1)

            def holds(elems: Tensor, values: Values) -> Tensor:
                return same_elements(values[""].to(flat.dtype), flat[elems]).cpu()

            self._adopt(expected, name, apart, cut.bits_elsewhere(apart, holds=holds))
        # A rank has the whole working param, so all of it is decided.
        cast[:] = True
        return self._source.uncertified_step is None

    def _follows(self, expected: ReferenceStep) -> bool:
        # Only a target's own rule has bits that the reference cannot predict.
        return not expected.skipped and self._source.has_own_rule

    def _seen(self, expected: ReferenceStep, name: str) -> tuple[Tensor, Tensor]:
        # Decisions hold for one step; the next one starts from the adopted bits.
        if expected.step != self._step:
            self._step = expected.step
            self._owned.clear()
            self._cast.clear()
        # Masks of whole params, because parts of several ranks share the decision.
        new = torch.zeros(expected.masters[name].numel(), dtype=torch.bool)
        return self._owned.setdefault(name, new), self._cast.setdefault(name, new.clone())

    def _cut_step(
        self, expected: ReferenceStep, name: str, apart: Tensor | None, decided: Tensor
    ) -> CutStep | None:
        # If any differing element was decided earlier, the difference is a finding.
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
        follower: State of the part; it may change.
        part: The part, as reported by its engine.
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
    """Return the indices of elements that differ in any key; None if keys, dtypes or sizes differ.

    Args:
        wanted: Expected tensors by key; 1D, or any shape for those without a value per element.
        shown: Tensors of the system by key.
    """
    elems = wanted[""].numel()
    apart = torch.zeros(elems, dtype=torch.bool)
    for key in wanted.keys() | shown.keys():
        one, other = wanted.get(key), shown.get(key)
        if one is None or other is None or one.dtype != other.dtype:
            return None
        if one.numel() != other.numel():
            return None
        # Counters and factors of matrices have another shape and are not compared by element.
        if one.shape == apart.shape and not torch.equal(one, other):
            # Masks are on the CPU; tensors of the system may be on another device.
            apart |= ~same_elements(one, other).cpu()
    return apart.nonzero().reshape(-1)


def same_as(shown: Values, elems: Tensor, values: Values) -> Tensor:
    """Return a mask of the elements with the given values in all keys.

    Args:
        shown: Tensors of the system by key. # each 1D
        elems: Indices into them. # 1D
        values: Values to compare with, one per index.
    """
    same = torch.ones_like(elems, dtype=torch.bool)
    for key, value in values.items():
        same &= same_elements(value, shown[key][elems]).cpu()
    return same
