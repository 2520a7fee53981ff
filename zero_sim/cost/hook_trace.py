"""The hook trace of a rank: when gradients arrive and modules begin, in the event log's time.

The harness sees it for itself, by hooks of its own on the module that it hands to the system, so
that a system need not be believed what it says of its overlap.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from zero_sim.cost.observer import Observer

if TYPE_CHECKING:
    from zero_sim.targets import StepResult

Clock = Callable[[], int]
"""How many moments the log has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HookEvent:
    """Something that was seen."""

    names: frozenset[str]
    """The param whose gradient arrived, or those that the module that began may read."""
    time: int


@dataclass(slots=True, eq=False)
class HookTrace(Observer):
    """What one rank did between its calls.

    Args:
        clock: The log's.
        unguarded: Params that no module with a forward has, so that they are never left in flight.
    """

    clock: Clock
    unguarded: frozenset[str] = frozenset()
    starts: dict[tuple[int, int], int] = field(default_factory=dict)
    """When each micro-batch began, by step and micro-batch."""
    arrivals: dict[tuple[int, int], list[HookEvent]] = field(default_factory=dict)
    """The gradients of each micro-batch."""
    begins: dict[int, list[HookEvent]] = field(default_factory=dict)
    """The modules that ran in the first micro-batch of a step, each as it began for the first time.
    """
    ends: dict[int, int] = field(default_factory=dict)
    """When the optimizer's step came back, by step."""
    _now: tuple[int, int] | None = None
    _begun: set[nn.Module] = field(default_factory=set)

    def before_micro_batch(self, step: int, micro: int) -> None:
        """Note that a micro-batch begins."""
        self._now = (step, micro)
        self._begun.clear()
        self.starts[self._now] = self.clock()

    def before_evaluation(self, step: int) -> None:
        """Note that modules begin, which wait for their gathers, before the first micro-batch."""
        if self._now is None:
            self._now = (step, 0)
            self._begun.clear()

    def after_step(self, step: int, losses: Sequence[Tensor], result: StepResult) -> None:
        """Note that the optimizer's step is done; what runs from now on is no training."""
        self._now = None
        self.ends[step] = self.clock()

    def _arrive(self, names: frozenset[str], grad: Tensor) -> None:
        if self._now is not None:
            event = HookEvent(names=names, time=self.clock())
            self.arrivals.setdefault(self._now, []).append(event)

    def _begin(self, names: frozenset[str], module: nn.Module, args: object) -> None:
        if self._now is None or self._now[1] or module in self._begun:
            return
        self._begun.add(module)
        event = HookEvent(names=names, time=self.clock())
        self.begins.setdefault(self._now[0], []).append(event)


def record_hooks(module: nn.Module, *, names: Mapping[Tensor, str], clock: Clock) -> HookTrace:
    """Put hooks on a module's params and on the modules that read them.

    Args:
        module: What the system was given to train, after it was built.
        names: Its params by the names that they had before.
        clock: The log's.
    """
    readers = readers_of(module, names=names)
    hook_trace = HookTrace(clock, unguarded=readers.get(None, frozenset()))
    for param, name in names.items():
        if param.requires_grad:
            param.register_hook(partial(hook_trace._arrive, frozenset({name})))
    for reader, read in readers.items():
        if reader is not None:
            # First, before whatever the system does when a module begins.
            reader.register_forward_pre_hook(partial(hook_trace._begin, read), prepend=True)
    return hook_trace


def tell_arrival(param: Tensor, arrive: Callable[[str], None], *, name: str) -> None:
    """Have a method called when a gradient of a param is there, as long as its object lives.

    Weakly, as the collector does not look into what such a hook holds: what a case built would
    never go.

    Args:
        param: A leaf that is trained.
        arrive: A bound method; it is given the name.
        name: Of the param.
    """
    param.register_post_accumulate_grad_hook(partial(_tell, weakref.WeakMethod(arrive), name))


def _tell(arrive: weakref.WeakMethod[Callable[[str], None]], name: str, param: Tensor) -> None:
    present = arrive()
    if present is not None:
        present(name)


def readers_of(
    module: nn.Module, *, names: Mapping[Tensor, str]
) -> Mapping[nn.Module | None, frozenset[str]]:
    """Return the params that the forward of each module may read.

    The closest module around a param that has a forward reads it; containers like
    `nn.ParameterList` have none. None stands for params with no such module.

    Args:
        module: The whole model.
        names: Its params by name; others are left out.
    """
    readers: dict[nn.Module | None, set[str]] = {}
    for path, param in module.named_parameters(remove_duplicate=False):
        if param not in names:
            continue
        around = _modules_around(module, path)
        closest = next(filter(_has_forward, around), None)
        # Attention reads the params of its output projection without calling it.
        attentions = [each for each in around if isinstance(each, nn.MultiheadAttention)]
        for reader in {closest, *attentions}:
            readers.setdefault(reader, set()).add(names[param])
    return {reader: frozenset(read) for reader, read in readers.items()}


def _modules_around(module: nn.Module, path: str) -> list[nn.Module]:
    """The modules that a param lies in, the innermost first."""
    around = [module]
    for part in path.split(".")[:-1]:
        around.append(getattr(around[-1], part))
    return around[::-1]


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)
