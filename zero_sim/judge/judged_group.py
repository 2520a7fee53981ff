"""The group of ranks that is judged: what is known of it, and what is noted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zero_sim.findings import describe as findings
from zero_sim.findings.compare import same_bits
from zero_sim.findings.recognition import Known, recognize
from zero_sim.findings.records import Finding
from zero_sim.judge.factors import FactorCauses
from zero_sim.judge.ownership import Ownership
from zero_sim.scenario.checks import Check
from zero_sim.scenario.spec import Scenario
from zero_sim.targets import Numerics, OwnedPart
from zero_sim.targets.adapt import DIVISION, GRADIENTS, PARTS

if TYPE_CHECKING:
    from zero_sim.targets.recorded import Record

Guesses = Callable[[], Iterable[Known]]
"""Gives what may have come in place of what was expected."""


class Comparer:
    """Compares tensors bit for bit, and counts their elements."""

    def __init__(self) -> None:
        self.elems = 0
        """Compared so far, of whatever kind of state."""

    def differs(self, expected: Tensor, got: Tensor) -> bool:
        """Whether dtype, number of elements or bits are others than expected."""
        self.elems += expected.numel()
        if expected.dtype != got.dtype or expected.numel() != got.numel():
            return True
        # Nearly all tensors are equal; only others need the rule for NaN.
        return not torch.equal(expected, got) and not same_bits(expected, got)


def beside(got: Tensor, expected: Tensor) -> Tensor:
    """A tensor where another one is, if it has no dimensions.

    Step counts are on the CPU or on the device of their param, as an optimizer's options have it.
    """
    return got if got.dim() else got.to(expected.device)


def cut_state(state: Tensor, *, master: Tensor, start: int, stop: int) -> Tensor:
    """Return the elements of a state tensor that a part of its master has, 1D.

    Only a state of the master's shape is cut. Counters, and state of another shape, such as factors
    of a matrix, are the whole param's.

    Args:
        state: A state tensor of a whole param.
        master: The whole master.
        start: First of the part's flattened elements.
        stop: One past the last one.
    """
    if not state.dim():
        return state
    flat = state.reshape(-1)
    return flat[start:stop] if state.shape == master.shape else flat


@dataclass(frozen=True, kw_only=True, slots=True)
class Noted:
    """What a judged group has noted at one time."""

    elems: int
    unobserved: frozenset[str]
    telling: Mapping[int, bool]
    guessed: frozenset[tuple[str, int | None, int | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedGroup:
    """A group of ranks with a judge: the judge and what it holds the ranks to share this."""

    scenario: Scenario
    numerics: Numerics
    ownership: Ownership
    world_ranks: Sequence[int]
    """Its ranks, as findings name them."""
    first_step: int
    """The first step to judge."""
    sees_all: bool
    """Whether all of its ranks are shown to its judge."""
    explainer: str = ""
    """`module:name` of the class that explains what differs; empty for no explanations."""
    recorder: Record | None = None
    """Takes the state after each step, to compare layouts; None if nothing is recorded."""
    comparer: Comparer = field(default_factory=Comparer)
    unobserved: set[str] = field(default_factory=set)
    """What the engine could tell and does not, so that nothing is known of it; grows."""
    telling: dict[int, bool] = field(default_factory=dict)
    """By rank: whether it tells the reduced gradient of any of its parts, in the step it is at."""
    _guessed: set[tuple[str, int | None, int | None]] = field(default_factory=set)
    """Check, step and rank of the findings that were looked at for what came instead."""

    @property
    def tells_divided(self) -> bool:
        """Whether the gradients that are told are divided already, where that comes after a sum."""
        return self.numerics.told_at != "before-division"

    @property
    def shows_grads_of_params(self) -> bool:
        """Whether gradients of whole params are to be seen as they were summed."""
        spec = self.scenario.optimizer
        changed = spec.clip_norm or spec.clip_value or spec.loss_scale
        return self.numerics.grads_in_params and (self.numerics.is_told_wide or not changed)

    @property
    def compares_layouts(self) -> bool:
        """True if masters and state are expected to be as another layout had them."""
        return self.scenario.pair is not None and self.recorder is None

    def of_layouts(self, at: Finding) -> Finding:
        """Return a finding on masters or state, under `equality.layout` if layouts are compared."""
        return replace(at, check=Check.EQUALITY_LAYOUT) if self.compares_layouts else at

    def note_unreported(self, *, divisor: float) -> None:
        """Note that the gradient or its division is unobserved if no optimizer state shows them.

        Only SGD's params show the size of a gradient: other optimizers step by a gradient over its
        own length.

        Args:
            divisor: Divisor of the sum over ranks, 1 for none.
        """
        if PARTS not in self.unobserved:
            return
        if not self.shows_grads_of_params:
            self.unobserved.add(GRADIENTS)
        shows_mean = self.shows_grads_of_params and (self.tells_divided or divisor == 1)
        if not shows_mean and self.scenario.optimizer.name != "sgd":
            self.unobserved.add(DIVISION)

    def noted(self) -> Noted:
        """What was noted so far, to be gone back to where a comparison begins again."""
        return Noted(
            elems=self.comparer.elems,
            unobserved=frozenset(self.unobserved),
            telling=dict(self.telling),
            guessed=frozenset(self._guessed),
        )

    def go_back(self, noted: Noted) -> None:
        """Note what was noted before and no more.

        Args:
            noted: From `noted`.
        """
        self.comparer.elems = noted.elems
        for kept, before in ((self.unobserved, noted.unobserved), (self._guessed, noted.guessed)):
            kept.intersection_update(before)
        self.telling.clear()
        self.telling.update(noted.telling)

    def differing(
        self,
        at: Finding,
        expected: Tensor,
        got: Tensor,
        *,
        known: Guesses = tuple,
        factors: FactorCauses | None = None,
    ) -> Finding:
        """Fill in a finding with what differs, and with what came instead where that is known.

        Args:
            at: The finding, of the first element that was compared.
            expected: Any shape.
            got: What came.
            known: Gives what that might be; asked for the first finding of each check and rank.
            factors: Of a gradient, or of its norm, the causes of a factor.
        """
        hint, key = "", (at.check, at.step, at.rank)
        if key not in self._guessed and expected.dtype == got.dtype:
            self._guessed.add(key)
            if expected.numel() == got.numel():
                hint = self._guess(expected, got, known)
        if factors is None:
            return findings.differing(at, expected, got, hint=hint)
        return findings.differing(at, expected, got, hint=hint, explain=factors.explain)

    def _guess(self, expected: Tensor, got: Tensor, known: Guesses) -> str:
        what = recognize(expected, got, known=known())
        if what:
            return f"what came {what}"
        timing = self.scenario.world.timing
        if timing != "eager" and bool((got.isnan() & ~expected.isnan()).any()):
            return (
                f"NaN came, which is what memory in flight holds under timing {timing!r}; it may "
                "have been read before its wait"
            )
        return ""

    def compare_update(
        self,
        part: OwnedPart,
        *,
        rank: int,
        step: int,
        master: Tensor,
        state: Mapping[str, Tensor],
        known: Callable[[str], Iterable[Known]] = lambda key: (),
    ) -> Iterator[Finding]:
        """Compare what the optimizer made of a part of a param.

        Args:
            part: The part of a param that a rank owns, as its engine shows it.
            rank: The rank that owns it.
            step: After which step.
            master: What it must be, cut to the part.
            state: What the optimizer's state must be, by torch's key.
            known: Gives what may have come instead, of a key, or of the master for an empty one.
        """
        place = part.place
        compared = [
            (Check.EQUALITY_STATE, key, state[key], beside(part.state[key], state[key]))
            for key in sorted(state.keys() & part.state.keys())
        ]
        compared.append((Check.EQUALITY_MASTER, "", master, part.master))
        for check, key, value, got in compared:
            if self.comparer.differs(value, got):
                at = self.of_layouts(findings.owned(check, key, step, rank, place))
                yield self.differing(at, value, got, known=partial(known, key))
        for key in sorted(state.keys() ^ part.state.keys()):
            at = self.of_layouts(findings.owned(Check.EQUALITY_STATE, key, step, rank, place))
            side = "the other layout" if self.compares_layouts else "the reference"
            side = side if key in part.state else "the system"
            yield findings.missing(at, f"optimizer state {key!r} is missing in {side}")
