"""Micro-batches for which some ranks have no data: these ranks join them with zeros.

A rank that joins makes the collectives of a micro-batch without a forward of its own. What it
accumulated in the step before is summed with the others' gradients.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_sim.errors import UsageError
from zero_sim.zero.config import ZeroConfig
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.gathers import OnUse
from zero_sim.zero.schedule import UnderBackward, Wrapped
from zero_sim.zero.step_count import StepCount
from zero_sim.zero.unit import Unit


class UnevenStepCount(StepCount):
    """The count of a step in which ranks may have data for different micro-batches.

    `divide_by="micro-batches"` counts those that ranks had data for.

    Raises:
        UsageError: If that count is needed before the step's last micro-batch.
    """

    def __init__(self, config: ZeroConfig, *, group: dist.ProcessGroup, divisor: Tensor) -> None:
        if config.divides_before_sum and config.sync == "every":
            config.check_counted_in_time("micro-batches", "micro-batches that had data")
        super().__init__(config, group=group, divisor=divisor)

    def reset(self) -> None:
        """Start a new step."""
        super().reset()
        self._joined = 0

    def join(self) -> None:
        """Note that this rank has no data for the micro-batch that begins."""
        self._joined += 1

    def _take(self, *, last: bool) -> int:
        if self._config.divide_by != "micro-batches":
            return super()._take(last=last)
        return self._sum_over_ranks(self.micro_batches + 1 - self._joined)


class RepeatableOnUse(OnUse):
    """Params gathered on use, on ranks that join micro-batches as well.

    A rank without data gathers and frees in the order of its last micro-batch that had some.
    """

    def __init__(self, wrapped: Wrapped, *, grads: UnderBackward) -> None:
        self._calls: list[tuple[nn.Module, tuple[Unit, ...], bool]] = []
        self._last_calls: list[tuple[nn.Module, tuple[Unit, ...], bool]] = []
        super().__init__(wrapped, grads=grads)

    def repeat_forward(self) -> None:
        """Gather and free as the last micro-batch's forward did, without one, beside other ranks'.

        The end of backward then goes the way back through it.

        Raises:
            UsageError: If there was none.
        """
        if not self._last_calls:
            raise UsageError(
                "expected a micro-batch with a forward on this rank before it joins one without, "
                "since params are gathered in the order of the last one, got none. Try a first "
                "micro-batch on every rank, or a stage below 3."
            )
        with torch.enable_grad():
            for module, needed, begins in self._last_calls:
                if begins:
                    self._before_forward(needed, module, ())
                else:
                    self._after_forward(needed, module, (), None)

    def finish_backward(self) -> None:
        """Come to the end of backward."""
        super().finish_backward()
        self._last_calls, self._calls = self._calls or self._last_calls, []

    def _before_forward(
        self, needed: tuple[Unit, ...], module: nn.Module, args: tuple[object, ...]
    ) -> None:
        if torch.is_grad_enabled() and not self._in_backward:
            self._calls.append((module, needed, True))
        super()._before_forward(needed, module, args)

    def _after_forward(
        self,
        needed: tuple[Unit, ...],
        module: nn.Module,
        args: tuple[object, ...],
        output: object,
    ) -> None:
        if torch.is_grad_enabled() and not self._in_backward:
            self._calls.append((module, needed, False))
        super()._after_forward(needed, module, args, output)


def join_micro_batch(
    ddp: DistributedDataParallel, last: bool, *, count: int | Tensor | None = None
) -> None:
    """Take part in a micro-batch for which this rank has no data, with gradients of zero.

    In the place of begin_last_micro_batch, forward, backward and end_micro_batch.

    Args:
        ddp: Built with `UnevenStepCount` and, where it shards params, `RepeatableOnUse`.
        last: As in `end_micro_batch`.
        count: As in `finish_grad_sync`.

    Raises:
        UsageError: As those; or if `ddp` counts micro-batches that all ranks have data for, or
            params are sharded and this rank has not trained in a micro-batch yet, in the order of
            which it gathers them.
    """
    if not isinstance(ddp.step_count, UnevenStepCount):
        raise UsageError(
            "expected an UnevenStepCount for a micro-batch without data, as what all divide by "
            "follows from it, got a StepCount. Pass seams=Seams(step_count=UnevenStepCount)."
        )
    ddp.step_count.join()
    ddp.finish_param_gather()
    if isinstance(ddp.param_schedule, RepeatableOnUse):
        ddp.param_schedule.repeat_forward()
    # After the forward, as on ranks that have one: it may count over ranks.
    if last or ddp.config.sync == "every":
        ddp.begin_last_micro_batch(count=count)
    ddp.end_micro_batch(last, count=count)
