"""Comparison with digests of steps that another process takes.

Digests show that all is as owed, or that something may not be; what differs they cannot say. So a
finding of this comparison is bare: its only use is to fall back to a reference of this process's
own, and to compare everything with that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from zero_sim.findings.records import Finding
from zero_sim.judge.judged_group import JudgedGroup
from zero_sim.judge.step_digests import StepDigests, key_of
from zero_sim.scenario.checks import Check
from zero_sim.targets import CompletedEngine, OwnedPart, StepResult
from zero_sim.targets.adapt import GRADIENTS

_DIFFERS = Finding(check=Check.EQUALITY_PARAMS, message="not as another process has it")


class DigestComparison:
    """Compares a group with digests; arguments of its methods are those of `Comparison`.

    Args:
        group: The judged group, and what is known of it.
        steps: Digests of the steps that ranks are compared with.
    """

    def __init__(self, group: JudgedGroup, *, steps: Mapping[int, StepDigests]) -> None:
        self._group = group
        self._steps = steps

    def compare_measured(self, result: StepResult, *, rank: int, step: int) -> Iterator[Finding]:
        """Compare norm and zeros; the norm only if every order of addition gives it."""
        expected = self._steps[step]
        if result.norm is not None and key_of("norm") in expected.digests:
            yield from self._compare(expected, result.norm, "norm")
        if result.zeros is not None and result.zeros != expected.zeros:
            yield _DIFFERS

    def compare_losses(
        self, losses: Sequence[Tensor], *, reads: object, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare the losses of all micro-batches."""
        for micro, loss in enumerate(losses):
            yield from self._compare(self._steps[step], loss, "loss", rank, micro)

    def compare_part(self, part: OwnedPart, *, rank: int, step: int) -> Iterator[Finding]:
        """Compare a part's gradient, master and optimizer state."""
        expected, place = self._steps[step], part.place
        at = (place.param, place.start, place.stop)
        key = key_of("grad", *at)
        if part.grad is not None and key in expected.digests:
            yield from self._compare(expected, part.grad, "grad", *at)
        elif key in expected.digests and key not in expected.zero_grads:
            if self._group.telling[rank]:
                yield _DIFFERS
            else:
                self._group.unobserved.add(GRADIENTS)
        yield from self._compare(expected, part.master, "master", *at)
        if expected.state_keys.get(place.param) != sorted(part.state):
            yield _DIFFERS
        for name, value in part.state.items():
            yield from self._compare(expected, value, "state", *at, name)

    def compare_reported(
        self, engine: CompletedEngine, *, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare gradients of whole params, if the target declares that it reports them."""
        expected = self._steps[step]
        self._group.note_unreported(divisor=expected.divisor)
        if not self._group.shows_grads_of_params:
            return
        reported = engine.gradients()
        for name in self._group.ownership.held[rank]:
            key = key_of("whole grad", name)
            if name in reported and key in expected.digests:
                yield from self._compare(expected, reported[name], "whole grad", name)
            elif key in expected.digests and key not in expected.zero_grads:
                yield _DIFFERS

    def scale_names(self, step: int) -> Sequence[str]:
        """Return the names of params in fp8."""
        return self._steps[step].scale_names

    def compare_scales(
        self, scales: Mapping[str, Tensor | None], *, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare the scales of params in fp8."""
        for name, scale in scales.items():
            if scale is None:
                yield _DIFFERS
            else:
                yield from self._compare(self._steps[step], scale, "scale", name)

    def compare_params(
        self, params: Mapping[str, Tensor], *, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare the working params that a rank holds, those that others own included."""
        expected = self._steps[step]
        for name in self._group.ownership.held[rank]:
            if name in params:
                yield from self._compare(expected, params[name], "param", name)
            elif key_of("param", name) in expected.digests:
                yield _DIFFERS

    def _compare(
        self, expected: StepDigests, got: Tensor, what: str, *where: object
    ) -> Iterator[Finding]:
        if not expected.agrees(got, what, *where):
            yield _DIFFERS
        self._group.comparer.elems += got.numel()
