"""A target's own update rule, run on whole params on one device without a process group.

The rule is trusted, because nothing exists to check it against. zero_sim only checks that a
comparison is possible: no random numbers, no process group, and all state where a copy includes it.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero_sim.errors import ProtocolError
from zero_sim.host.device import random_state
from zero_sim.reference.whole_params import Move, TextbookOptimizer
from zero_sim.scenario.spec import Scenario

States = Mapping[str, Mapping[str, Tensor]]
"""State tensors by param and key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnRule:
    """An update rule, given by either `build` or `step`."""

    name: str
    """Name in messages, such as `reference_step of target 'mine'`."""
    scenario: Scenario
    """The case, as passed to the target."""
    build: Callable[[Mapping[str, Tensor], Scenario], Any] | None = None
    """Builds an optimizer with torch's interface from params by name."""
    step: Move | None = None
    """Moves one param in place, given param, gradient, state and settings."""
    read_state: Callable[[Any, Mapping[str, Tensor]], States] | None = None
    """Reads state by param from the optimizer and its params; None for `optimizer.state`."""
    elementwise: bool = False
    """True if an element's step depends on this element alone."""
    alone: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context in which the rule runs, without a process group."""

    def __deepcopy__(self, memo: object) -> OwnRule:
        """Return the rule itself, because a target is not copied with the reference."""
        return self


class OwnOptimizer:
    """A rule's optimizer, over its own params.

    Args:
        rule: The rule.
        params: Params to step, by name.
        groups: Params and settings by group, for a rule that moves single params.

    Raises:
        ProtocolError: The rule raises, or does something that the reference cannot repeat.
    """

    def __init__(
        self,
        rule: OwnRule,
        *,
        params: Mapping[str, Tensor],
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        self._rule, self._params = rule, params
        # A rule for single params runs in a plain loop over them.
        if rule.step is not None:
            self._inner: Any = TextbookOptimizer(_without_params(rule.step), groups)
        else:
            assert rule.build is not None
            with self._alone():
                self._inner = rule.build(dict(params), rule.scenario)
        self._check()

    def _check(self) -> None:
        inner = self._inner
        # Any class with torch's attributes will do.
        missing = [
            name for name in ("param_groups", "state", "step") if getattr(inner, name, None) is None
        ]
        if missing:
            raise self._wrong(
                f"an optimizer with {', '.join(missing)}", f"a {type(inner).__name__}"
            )
        stepped = [id(param) for group in inner.param_groups for param in group["params"]]
        # By identity, because tensors compare elementwise.
        names = [name for name, param in self._params.items() if stepped.count(id(param)) != 1]
        if names or len(stepped) != len(self._params):
            raise self._wrong(
                "each of its params in exactly one param group",
                f"{len(stepped)} params in groups, wrong for {', '.join(names) or 'others'}",
            )
        if any("lr" not in group for group in inner.param_groups):
            raise self._wrong(
                "'lr' in every param group, because a warm-up scales it", "a group without 'lr'"
            )

    def _wrong(self, wanted: str, got: str) -> ProtocolError:
        return ProtocolError(f"expected {self._rule.name} to return {wanted}, got {got}.")

    @property
    def param_groups(self) -> Sequence[dict[str, Any]]:
        """Param groups, as in torch's optimizers; live."""
        return self._inner.param_groups

    def step(self) -> None:
        """Move every param that has a gradient."""
        with self._alone():
            self._inner.step()

    def states(self) -> States:
        """Return state tensors by param and key; live."""
        if self._rule.read_state is None:
            # torch's layout: state under the param itself.
            held = self._inner.state
            found = {name: held.get(param, {}) for name, param in self._params.items()}
        else:
            with self._alone():
                found = self._rule.read_state(self._inner, dict(self._params))
        # Other values, such as numbers, have no elements to compare or cut.
        return {
            name: {k: v for k, v in found.get(name, {}).items() if isinstance(v, Tensor)}
            for name in self._params
        }

    def take_state(self, other: OwnOptimizer, *, cut: Callable[[str, Tensor], Tensor]) -> None:
        """Copy state and group settings from another optimizer of the same rule.

        Args:
            other: Optimizer over params with these names, and possibly more.
            cut: Returns the part of a state tensor to keep, given its key and the tensor.
        """
        # A memo that maps their params to ours, so that references in copied state follow.
        memo: dict[int, Any] = {id(other._params[n]): param for n, param in self._params.items()}
        names = {id(param): name for name, param in other._params.items()}
        own_names = {id(param): name for name, param in self._params.items()}
        # Replace all state, because an optimizer may create some when it is built.
        self._inner.state.clear()
        for key, held in other._inner.state.items():
            # State of a param that only the other optimizer has.
            if names.get(id(key), "") not in self._params and id(key) in names:
                continue
            copied = deepcopy(held, memo)
            # State under other keys than params has no elements to cut.
            if id(key) in names and isinstance(copied, dict):
                copied = {k: cut(k, v) if isinstance(v, Tensor) else v for k, v in copied.items()}
            self._inner.state[memo.get(id(key), key)] = copied
        # Matched by params, because a rule may omit groups without params.
        group_of = {
            names[id(param)]: group for group in other.param_groups for param in group["params"]
        }
        for group in self.param_groups:
            if group["params"]:
                theirs = group_of[own_names[id(group["params"][0])]]
                group.update({k: deepcopy(v, memo) for k, v in theirs.items() if k != "params"})

    @contextmanager
    def _alone(self) -> Generator[None]:
        """Run the rule as on a single device, and attribute its exceptions to the target."""
        # Compared in every call, because a rule may draw in any call.
        before = _generators()
        try:
            with self._rule.alone(), torch.no_grad():
                yield
        # Rules are foreign code and may raise anything.
        except Exception as error:
            # The innermost frame, in the rule or in code that it calls.
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise ProtocolError(
                f"expected {self._rule.name} to step whole params on one device, where no process "
                f"group exists, got {type(error).__name__}: {error}, at {frame.filename}:"
                f"{frame.lineno}."
            ) from error
        # Values do not reveal a draw, so compare the generators' states.
        if _generators() != before:
            raise ProtocolError(
                f"expected {self._rule.name} to use no random numbers, because no system could "
                "draw the same numbers on its shards, got a call that moved a generator. Compute "
                "them from the step count and the values."
            )


# Settings only, because a rule that moves one param must not reach others.
def _without_params(step: Move) -> Move:
    def move(param: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        step(param, grad, state, {key: value for key, value in group.items() if key != "params"})

    return move


def _generators() -> tuple[object, ...]:
    """Return the state of every generator that a rule could use, as comparable values."""
    # Generators of the CPU, of the accelerator and of Python.
    device = random_state()
    return (
        torch.default_generator.get_state().numpy().tobytes(),
        None if device is None else device.cpu().numpy().tobytes(),
        random.getstate(),
    )
