"""Hook trace of a rank: gradient arrivals and module starts, in event log time.

The harness observes both with its own hooks, so checks of overlap need no reports from the system.
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
"""Returns the event log's length in moments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HookEvent:
    """Gradient arrival or module start."""

    names: frozenset[str]
    """The param with a new gradient, or params that the module may read."""
    time: int


@dataclass(slots=True, eq=False)
class HookTrace(Observer):
    """A rank's gradient arrivals and module starts, with their times.

    Args:
        clock: Clock of the event log.
        unguarded: Params that no module with a forward reads. No hook can wait for their gathers,
            so a system must wait at once.
    """

    clock: Clock
    unguarded: frozenset[str] = frozenset()
    starts: dict[tuple[int, int], int] = field(default_factory=dict)
    """Starts of micro-batches, by (step, micro-batch)."""
    arrivals: dict[tuple[int, int], list[HookEvent]] = field(default_factory=dict)
    """Gradients by (step, micro-batch)."""
    begins: dict[int, list[HookEvent]] = field(default_factory=dict)
    """First start of each module in a step's first micro-batch, by step."""
    ends: dict[int, int] = field(default_factory=dict)
    """Ends of optimizer steps, by step."""
    _now: tuple[int, int] | None = None
    _begun: set[nn.Module] = field(default_factory=set)

    def before_micro_batch(self, step: int, micro: int) -> None:
        """Record the start of a micro-batch."""
        self._now = (step, micro)
        self._begun.clear()
        self.starts[self._now] = self.clock()

    def before_evaluation(self, step: int) -> None:
        """Record modules of an evaluation between steps, because these wait for the gathers."""
        if self._now is None:
            self._now = (step, 0)
            self._begun.clear()

    def after_step(self, step: int, losses: Sequence[Tensor], result: StepResult) -> None:
        """Record the end of the optimizer step, and stop: later forwards are not training."""
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
        clock: Clock of the event log.
    """
    readers = readers_of(module, names=names)
    hook_trace = HookTrace(clock, unguarded=readers.get(None, frozenset()))
    for param, name in names.items():
        if param.requires_grad:
            # Runs before autograd accumulates the gradient, and so before a system's
            # post-accumulate hook reduces it.
            param.register_hook(partial(hook_trace._arrive, frozenset({name})))
    for reader, read in readers.items():
        if reader is not None:
            # Prepended, so that it runs before the system's hook waits for a gather.
            reader.register_forward_pre_hook(partial(hook_trace._begin, read), prepend=True)
    return hook_trace


def watch_arrival(param: Tensor, arrive: Callable[[str], None], *, name: str) -> None:
    """Call a bound method with a param's name when its gradient has been accumulated."""
    # Weak, because the garbage collector cannot look into autograd's hooks: a strong reference
    # would keep a whole case alive.
    param.register_post_accumulate_grad_hook(partial(_arrived, weakref.WeakMethod(arrive), name))


def _arrived(arrive: weakref.WeakMethod[Callable[[str], None]], name: str, param: Tensor) -> None:
    present = arrive()
    # None if the object is gone.
    if present is not None:
        present(name)


def readers_of(
    module: nn.Module, *, names: Mapping[Tensor, str]
) -> Mapping[nn.Module | None, frozenset[str]]:
    """Return the params that each module's forward may read.

    The closest enclosing module with a forward reads a param; containers such as `nn.ParameterList`
    have no forward. The key None has the params without such a module.

    Args:
        module: The whole model.
        names: Params to consider, with their names.
    """
    readers: dict[nn.Module | None, set[str]] = {}
    for path, param in module.named_parameters(remove_duplicate=False):
        # Tied params appear under each name, because each of their modules reads them.
        if param not in names:
            continue
        around = _modules_around(module, path)
        closest = next(filter(_has_forward, around), None)
        # Attention reads its output projection's params directly, without calling that module.
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
    # Wrappers may set a forward on the instance.
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)
