"""Interface between comparisons and explainers of differences.

An explainer repeats a step by other rules. Explainers are in a wing (`zero_sim.rules`), which the
judge must not import. So the judge gets an explainer's name, and loads it when something differs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from zero_sim.findings.recognition import Known
from zero_sim.judge.judged_group import JudgedGroup, cut_state
from zero_sim.judge.reported_grads import sum_as_reported
from zero_sim.judge.rules_tried import RulesTried, What
from zero_sim.reference import Reference, ReferenceStep, StepAgain
from zero_sim.targets import Numerics, OwnedPart


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """A comparison on a rank: a gradient part, a master with its state, or a param."""

    what: What
    rank: int
    """Group rank."""
    pick: Callable[[StepAgain], Mapping[str, Tensor]]
    """Picks the compared tensors from a step by any rules."""


class Explainer(Protocol):
    """Explains the differences in a step."""

    def look(self, observation: Observation, got: Mapping[str, Tensor], *, agrees: bool) -> None:
        """Add a comparison.

        Args:
            observation: The comparison.
            got: The rank's tensors, under the names of `observation.pick`.
            agrees: True if `got` has the expected bits.
        """
        ...

    def known_grads(self, name: str, *, rank: int, start: int) -> Iterator[Known]:
        """Yield gradients without some of their terms, as candidates for a reduced gradient.

        Args:
            name: Param name.
            rank: Group rank.
            start: Offset of the compared part.
        """
        ...

    def explain_norm(self, norm: Tensor) -> str:
        """Return the rules that give this norm as text; empty without any.

        Args:
            norm: Reported norm. # 0D, fp32
        """
        ...

    def tried(self) -> RulesTried | None:
        """Return the result of trying rules; None if no gradient and no update differs."""
        ...


class Explanations:
    """A group's explainers by step.

    Args:
        group: The judged group.
        reference: Returns its oracle.
    """

    def __init__(self, group: JudgedGroup, *, reference: Callable[[], Reference]) -> None:
        self._group = group
        self._reference = reference
        self._agreed: dict[int, list[Observation]] = {}
        """Agreeing comparisons by step, until something differs."""
        self._explainers: dict[int, Explainer] = {}

    def note(
        self,
        expected: ReferenceStep,
        observation: Observation,
        got: Mapping[str, Tensor],
        *,
        agrees: bool,
    ) -> None:
        """Record a comparison.

        Args:
            expected: The reference's step.
            observation: The comparison.
            got: The rank's tensors.
            agrees: True if `got` has the expected bits.
        """
        # Until something differs, keep the comparison without tensors, because they are live state.
        if agrees and expected.step not in self._explainers:
            # Without the start state the step cannot be repeated.
            if expected.start is not None:
                self._agreed.setdefault(expected.step, []).append(observation)
            return
        explainer = self.of(expected)
        if explainer is not None:
            explainer.look(observation, got, agrees=agrees)

    def of(self, expected: ReferenceStep) -> Explainer | None:
        """Return a step's explainer.

        Args:
            expected: A step with a difference.

        Returns:
            None if the case has no explainer, or the step has no start state to repeat it from.
        """
        step, name = expected.step, self._group.explainer
        if step not in self._explainers and name and expected.start is not None:
            # Imported here, so that passing cases do not load the wing.
            module, _, attribute = name.partition(":")
            explainer: Callable[..., Explainer] = getattr(
                importlib.import_module(module), attribute
            )
            self._explainers[step] = explainer(
                expected,
                reference=self._reference(),
                group=self._group,
                # Rules must also give the expected bits in these comparisons.
                agreed=self._agreed.pop(step, []),
            )
        return self._explainers.get(step)

    def forget(self, step: int) -> None:
        """Drop a step without differences."""
        self._agreed.pop(step, None)

    def tried(self, step: int | None) -> RulesTried | None:
        """Return the result of trying rules on a step; None without a difference."""
        explainer = None if step is None else self._explainers.get(step)
        return None if explainer is None else explainer.tried()


def part_seen(part: OwnedPart, *, rank: int) -> tuple[Observation, Mapping[str, Tensor]]:
    """Return the comparison of a part's master and state, with their values.

    Args:
        part: Reported by the engine.
        rank: Group rank.
    """
    place = part.place

    def pick(by: StepAgain) -> dict[str, Tensor]:
        master, state = by.step.masters[place.param], by.step.state[place.param]
        cut = partial(cut_state, master=master, start=place.start, stop=place.stop)
        held = {name: cut(value) for name, value in state.items()}
        return {"master": master.reshape(-1)[place.start : place.stop], **held}

    # A rule must fit master and state together, because both come from the same update.
    observation = Observation(what="update", rank=rank, pick=pick)
    return observation, {"master": part.master, **part.state}


def grad_seen(
    name: str,
    got: Tensor,
    *,
    cut: Callable[[Tensor], Tensor],
    rank: int,
    numerics: Numerics,
) -> tuple[Observation, Mapping[str, Tensor]]:
    """Return the comparison of a reduced gradient, with its values.

    Args:
        name: Param name.
        got: The reported gradient.
        cut: Cuts a whole gradient to the reported part.
        rank: Group rank.
        numerics: Declared by the target.
    """

    def pick(by: StepAgain) -> dict[str, Tensor]:
        return {name: cut(sum_as_reported(by, name, numerics=numerics))}

    return Observation(what="gradient", rank=rank, pick=pick), {name: got}


def param_seen(name: str, got: Tensor, *, rank: int) -> tuple[Observation, Mapping[str, Tensor]]:
    """Return the comparison of a working param, with its values.

    Args:
        name: Param name.
        got: The rank's values.
        rank: Group rank.
    """
    observation = Observation(
        what="update", rank=rank, pick=lambda by: {name: by.step.params[name]}
    )
    return observation, {name: got}
