"""The hook trace of a rank: arrival of gradients and start of modules, in the event log's time.

The harness observes both with its own hooks on the module, so the check of overlap does not depend
on reports of the system under test.
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
"""Returns the number of moments in the event log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HookEvent:
    """An arrival of a gradient, or the start of a module."""

    names: frozenset[str]
    """The param with a new gradient, or the params that the module may read."""
    time: int


@dataclass(slots=True, eq=False)
class HookTrace(Observer):
    """Gradients and modules of one rank between its calls.

    Args:
        clock: Time of the event log.
        unguarded: Params outside every module with a forward. No hook can wait for them, so they
            are never left in flight.
    """

    clock: Clock
    unguarded: frozenset[str] = frozenset()
    starts: dict[tuple[int, int], int] = field(default_factory=dict)
    """Start of each micro-batch, by (step, micro-batch)."""
    arrivals: dict[tuple[int, int], list[HookEvent]] = field(default_factory=dict)
    """Gradients of each micro-batch."""
    begins: dict[int, list[HookEvent]] = field(default_factory=dict)
    """First start of each module in the first micro-batch of a step."""
    ends: dict[int, int] = field(default_factory=dict)
    """Return of the optimizer's step, by step."""
    _now: tuple[int, int] | None = None
    _begun: set[nn.Module] = field(default_factory=set)

    def before_micro_batch(self, step: int, micro: int) -> None:
        """Record the start of a micro-batch."""
        self._now = (step, micro)
        self._begun.clear()
        self.starts[self._now] = self.clock()

    def before_evaluation(self, step: int) -> None:
        """Record modules of an evaluation before the first micro-batch: they wait for gathers."""
        if self._now is None:
            self._now = (step, 0)
            self._begun.clear()

    def after_step(self, step: int, losses: Sequence[Tensor], result: StepResult) -> None:
        """Record the end of the optimizer's step, and stop: later forwards are not training."""
        self._now = None
        self.ends[step] = self.clock()

    def _arrive(self, names: frozenset[str], grad: Tensor) -> None:
        if self._now is not None:
            event = HookEvent(names=names, time=self.clock())
            self.arrivals.setdefault(self._now, []).append(event)

    def _begin(self, names: frozenset[str], module: nn.Module, args: object) -> None:
        # Only first starts in micro-batch 0: later ones find their params already gathered.
        if self._now is None or self._now[1] or module in self._begun:
            return
        self._begun.add(module)
        event = HookEvent(names=names, time=self.clock())
        self.begins.setdefault(self._now[0], []).append(event)


def record_hooks(module: nn.Module, *, names: Mapping[Tensor, str], clock: Clock) -> HookTrace:
    """Register hooks on a module's params and on the modules that read them.

    Args:
        module: The module passed to the system, after the system was built.
        names: Its params with their names in the bare model.
        clock: Time of the event log.
    """
    readers = readers_of(module, names=names)
    hook_trace = HookTrace(clock, unguarded=readers.get(None, frozenset()))
    for param, name in names.items():
        if param.requires_grad:
            # Fires before autograd accumulates the gradient, so before systems' post-accumulate
            # hooks reduce it.
            param.register_hook(partial(hook_trace._arrive, frozenset({name})))
    for reader, read in readers.items():
        if reader is not None:
            # Prepended, so it fires before the system's own hook waits for a gather.
            reader.register_forward_pre_hook(partial(hook_trace._begin, read), prepend=True)
    return hook_trace


def tell_arrival(param: Tensor, arrive: Callable[[str], None], *, name: str) -> None:
    """Call a method when a param's gradient has been accumulated.

    Args:
        param: A trained leaf.
        arrive: A bound method, called with the name.
        name: Name of the param.
    """
    # Weak, because the garbage collector does not look into autograd's hooks: a strong reference
    # would keep everything that a case built alive.
    param.register_post_accumulate_grad_hook(partial(_tell, weakref.WeakMethod(arrive), name))


def _tell(arrive: weakref.WeakMethod[Callable[[str], None]], name: str, param: Tensor) -> None:
    present = arrive()
    # None once the object is gone.
    if present is not None:
        present(name)


def readers_of(
    module: nn.Module, *, names: Mapping[Tensor, str]
) -> Mapping[nn.Module | None, frozenset[str]]:
    """Return the params that the forward of each module may read.

    A param is read by the closest enclosing module with a forward; containers such as
    `nn.ParameterList` have none. The key None stands for params without such a module.

    Args:
        module: The whole model.
        names: Its params by name; others are omitted.
    """
    readers: dict[nn.Module | None, set[str]] = {}
    for path, param in module.named_parameters(remove_duplicate=False):
        # Tied params appear once per name, because each of their modules reads them.
        if param not in names:
            continue
        around = _modules_around(module, path)
        closest = next(filter(_has_forward, around), None)
        # Attention reads the params of its output projection directly, without calling it.
        attentions = [each for each in around if isinstance(each, nn.MultiheadAttention)]
        for reader in {closest, *attentions}:
            readers.setdefault(reader, set()).add(names[param])
    return {reader: frozenset(read) for reader, read in readers.items()}


def _modules_around(module: nn.Module, path: str) -> list[nn.Module]:
    """Return the modules that contain a param, innermost first."""
    around = [module]
    for part in path.split(".")[:-1]:
        around.append(getattr(around[-1], part))
    return around[::-1]


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)
    # A forward may also be set on the instance, as wrappers do.
