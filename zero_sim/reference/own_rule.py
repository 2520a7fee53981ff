"""An update rule that a target brings along: whole params, one device, no process group.

The rule is trusted, since there is nothing to compare it with. Checked is what a comparison with it
relies on: it draws no random numbers, reaches no process group, and keeps all its state where a
copy finds it.
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
    """An update rule; either `build` or `step` is given."""

    name: str
    """As messages name it: `reference_step of target 'mine'`."""
    scenario: Scenario
    """The case, as the target is given it."""
    build: Callable[[Mapping[str, Tensor], Scenario], Any] | None = None
    """From params by name to an optimizer with the form of torch's."""
    step: Move | None = None
    """Moves one param in place; its arguments are param, gradient, state and settings."""
    read_state: Callable[[Any, Mapping[str, Tensor]], States] | None = None
    """State by param, from the optimizer and its params; None for `optimizer.state`."""
    elementwise: bool = False
    """True if the step of an element depends on that element alone."""
    alone: Callable[[], AbstractContextManager[None]] = nullcontext
    """Makes the block in which it runs, where no process group exists."""

    def __deepcopy__(self, memo: object) -> OwnRule:
        """Return itself: a target is not copied with the reference."""
        return self


class OwnOptimizer:
    """The optimizer of a rule, over params of its own.

    Args:
        rule: The rule.
        params: Each param that it has to step, by name.
        groups: Params and their settings by group, for a rule that moves one param.

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
        if rule.step is not None:
            self._inner: Any = TextbookOptimizer(_without_params(rule.step), groups)
        else:
            assert rule.build is not None
            with self._alone():
                self._inner = rule.build(dict(params), rule.scenario)
        self._check()

    def _check(self) -> None:
        inner = self._inner
        missing = [
            name for name in ("param_groups", "state", "step") if getattr(inner, name, None) is None
        ]
        if missing:
            raise self._wrong(
                f"an optimizer with {', '.join(missing)}", f"a {type(inner).__name__}"
            )
        stepped = [id(param) for group in inner.param_groups for param in group["params"]]
        names = [name for name, param in self._params.items() if stepped.count(id(param)) != 1]
        if names or len(stepped) != len(self._params):
            raise self._wrong(
                "one param group for each param that it is given",
                f"{len(stepped)} params in groups, wrong for {', '.join(names) or 'others'}",
            )
        if any("lr" not in group for group in inner.param_groups):
            raise self._wrong(
                "'lr' in every param group, which a warm-up scales", "a group without"
            )

    def _wrong(self, wanted: str, got: str) -> ProtocolError:
        return ProtocolError(f"expected {self._rule.name} to give {wanted}, got {got}.")

    @property
    def param_groups(self) -> Sequence[dict[str, Any]]:
        """Groups as torch's optimizers have them; live."""
        return self._inner.param_groups

    def step(self) -> None:
        """Move every param that has a gradient."""
        with self._alone():
            self._inner.step()

    def states(self) -> States:
        """Return state tensors by param and key; live."""
        if self._rule.read_state is None:
            held = self._inner.state
            found = {name: held.get(param, {}) for name, param in self._params.items()}
        else:
            with self._alone():
                found = self._rule.read_state(self._inner, dict(self._params))
        return {
            name: {k: v for k, v in found.get(name, {}).items() if isinstance(v, Tensor)}
            for name in self._params
        }

    def take_state(self, other: OwnOptimizer, *, cut: Callable[[str, Tensor], Tensor]) -> None:
        """Copy the state and the groups' settings of another optimizer of the same rule.

        Args:
            other: An optimizer over params of these names, and maybe others.
            cut: Gives what a state tensor of a key becomes here.
        """
        memo: dict[int, Any] = {id(other._params[n]): param for n, param in self._params.items()}
        names = {id(param): name for name, param in other._params.items()}
        own_names = {id(param): name for name, param in self._params.items()}
        self._inner.state.clear()
        for key, held in other._inner.state.items():
            if names.get(id(key), "") not in self._params and id(key) in names:
                continue
            copied = deepcopy(held, memo)
            if id(key) in names and isinstance(copied, dict):
                copied = {k: cut(k, v) if isinstance(v, Tensor) else v for k, v in copied.items()}
            self._inner.state[memo.get(id(key), key)] = copied
        # By params: a rule may leave out groups of which it is given none.
        group_of = {
            names[id(param)]: group for group in other.param_groups for param in group["params"]
        }
        for group in self.param_groups:
            if group["params"]:
                theirs = group_of[own_names[id(group["params"][0])]]
                group.update({k: deepcopy(v, memo) for k, v in theirs.items() if k != "params"})

    @contextmanager
    def _alone(self) -> Generator[None]:
        """Run the rule as on a single device, and charge what it raises to it."""
        before = _generators()
        try:
            with self._rule.alone(), torch.no_grad():
                yield
        # The rule is a stranger's and may raise anything.
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise ProtocolError(
                f"expected {self._rule.name} to step whole params on one device, where no process "
                f"group exists, got {type(error).__name__}: {error}, at {frame.filename}:"
                f"{frame.lineno}."
            ) from error
        if _generators() != before:
            raise ProtocolError(
                f"expected {self._rule.name} to use no random numbers, because no system could "
                "draw the same ones on its shards, got one that moved a generator. Compute them "
                "from the step count and the values."
            )


def _without_params(step: Move) -> Move:
    def move(param: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        step(param, grad, state, {key: value for key, value in group.items() if key != "params"})

    return move


def _generators() -> tuple[object, ...]:
    """The state of each generator that a rule might draw from, as values to compare."""
    device = random_state()
    return (
        torch.default_generator.get_state().numpy().tobytes(),
        None if device is None else device.cpu().numpy().tobytes(),
        random.getstate(),
    )
