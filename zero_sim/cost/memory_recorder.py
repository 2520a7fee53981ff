"""Recorder of a rank's memory within a step, by the harness's hooks.

It only records. After the step, the closed forms (`peaks`, `grad_peaks`, `staging`, `checkpoints`)
check the recorded moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from zero_sim.cost.hook_trace import watch_arrival
from zero_sim.cost.observer import Observer

if TYPE_CHECKING:
    from zero_sim.findings.records import Finding
    from zero_sim.targets import StepResult

Look = Callable[[], Iterable[tuple[str, str, int]]]
"""Returns the unsharded memory now, by bucket: (`gradients` or `params`, a param in it, bytes)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A moment in the step, recorded after the system's own hooks have run."""

    what: Literal["begin", "end", "again", "reach", "grad", "forward", "update"]
    """`begin`, `end`: a module began or ended; `again`: it began again in backward; `reach`:
    backward reached its output; `grad`: a gradient arrived; `forward`: a forward of the model
    ended; `update`: an optimizer steps."""
    micro: int
    module: nn.Module | None = None
    """The module, for `begin`, `end` and `again`."""
    end: int = 0
    """Number of modules that ended before this module in the micro-batch, for `reach`."""
    param: str = ""
    """The param, for `grad`."""
    whole: Sequence[tuple[str, str, int]] = ()
    """Unsharded memory as returned by `Look`, without entries of 0 bytes."""
    bytes: int = 0
    """Bytes of checkpoints, for `forward`; bytes of the optimizer's gradients, for `update`."""


Form = Callable[[Sequence[Moment]], "Iterator[Finding]"]
"""Closed form that yields a finding for each moment with unexpected memory."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class MemoryRecorder(Observer):
    """Recorder of a rank's moments in a step.

    Args:
        step: Step to record, counted from 0.
        look: Returns unsharded memory; None not to record it.
        kept: Returns the activation checkpoint bytes; None not to record them.
        with_updates: True to record the gradients passed to optimizers.
    """

    step: int
    look: Look | None = None
    kept: Callable[[], int] | None = None
    with_updates: bool = False
    forms: list[Form] = field(default_factory=list)
    """Closed forms to check."""
    moments: list[Moment] = field(default_factory=list)
    _micro: int | None = None
    """Current micro-batch; None outside the step."""
    _ends: int = 0
    _in_backward: bool = False
    _end_of: dict[nn.Module, int] = field(default_factory=dict)
    """Last end by module."""

    def findings(self) -> Iterator[Finding]:
        """Yield the first finding from each closed form."""
        for form in self.forms:
            # Only the first, because an excess usually repeats at all later moments.
            found = next(form(self.moments), None)
            if found is not None:
                yield found

    def watch_grads(self, names: Mapping[Tensor, str]) -> None:
        """Record gradient arrivals; `names` has the params with their names."""
        for param, name in names.items():
            if param.requires_grad and param.numel():
                watch_arrival(param, self._arrive, name=name)

    def watch_modules(self, modules: Iterable[nn.Module]) -> None:
        """Record when modules start and end, and when backward reaches their outputs."""
        for module in modules:
            module.register_forward_pre_hook(self._begin)
            module.register_forward_hook(self._end)

    def before_micro_batch(self, step: int, micro: int) -> None:
        """Begin to record a micro-batch."""
        if step == self.step:
            self._micro, self._ends, self._in_backward = micro, 0, False

    def before_evaluation(self, step: int) -> None:
        """Stop recording modules, because a forward under `no_grad` keeps nothing for backward."""
        # In backward, `_begin` records only modules that run with gradients.
        self._in_backward = True

    def after_forward(self, step: int) -> None:
        """Record the activation checkpoint bytes."""
        if self._micro is not None and self.kept is not None:
            self.moments.append(Moment(what="forward", micro=self._micro, bytes=self.kept()))

    def updating(self, step: int) -> AbstractContextManager[object] | None:
        """Record the optimizer's gradients."""
        # By torch's global hook, which needs no access to the system's optimizer.
        return self._update() if self.with_updates and step == self.step else None

    def after_step(self, step: int, losses: Sequence[Tensor], result: StepResult) -> None:
        """Stop recording."""
        self._micro = None

    @contextmanager
    def _update(self) -> Iterator[None]:
        handle = register_optimizer_step_pre_hook(self._look_at_update)
        try:
            yield
        finally:
            handle.remove()

    def _look_at_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        grads = [
            param.grad
            for group in optimizer.param_groups
            for param in group["params"]
            if getattr(param, "grad", None) is not None
        ]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in grads}
        # A storage that several views share counts once.
        held = sum(each.nbytes() for each in storages.values())
        self.moments.append(Moment(what="update", micro=self._micro or 0, bytes=held))

    def _begin(self, module: nn.Module, args: object) -> None:
        if not self._in_backward:
            self._note("begin", module=module)
        elif torch.is_grad_enabled():
            # An activation checkpoint runs the module again, as part of backward.
            self._note("again", module=module)

    def _end(self, module: nn.Module, args: object, output: object) -> None:
        if self._micro is None:
            return
        if not self._in_backward:
            self._note("end", module=module)
            self._end_of[module] = self._ends
            self._ends += 1
        # With a reentrant checkpoint, only outputs of the second run get a gradient.
        end = self._end_of.get(module, 0)
        for tensor in _tensors_in(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                # Backward never reaches an output without a grad_fn.
                tensor.register_hook(partial(self._reach, self._micro, end))

    def _reach(self, micro: int, end: int, grad: Tensor) -> None:
        if micro == self._micro:
            # Only this micro-batch's graph, and no backward outside of the step.
            self._in_backward = True
            self._note("reach", end=end)

    def _arrive(self, name: str) -> None:
        self._note("grad", param=name)

    def _note(
        self, what: Literal["begin", "end", "again", "reach", "grad"], **details: Any
    ) -> None:
        if self._micro is not None and self.look is not None:
            # Look now, because the memory may be gone at the next moment.
            whole = tuple(each for each in self.look() if each[2])
            self.moments.append(Moment(what=what, micro=self._micro, whole=whole, **details))


def _tensors_in(output: object) -> Iterator[Tensor]:
    # Models may return mappings and nested sequences of tensors.
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors_in(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _tensors_in(value)
