"""Micro-batches without data on some ranks: these ranks join with zero gradients.

A joining rank issues a micro-batch's collectives without a forward. Gradients that it accumulated
earlier in the step take part in the sum.
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
    """A step's count if ranks have different numbers of micro-batches.

    `divide_by="micro-batches"` counts micro-batches with data, over all ranks.

    Raises:
        UsageError: If this count is needed before the step's last micro-batch.
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
        """Record that this rank has no data for the next micro-batch."""
        self._joined += 1

    def _take(self, *, last: bool) -> int:
        if self._config.divide_by != "micro-batches":
            return super()._take(last=last)
        # micro_batches does not include the current micro-batch yet, so add 1.
        return self._sum_over_ranks(self.micro_batches + 1 - self._joined)


class RepeatableOnUse(OnUse):
    """Params gathered on use, also on ranks that join micro-batches.

    A rank without data gathers and reshards in the order of its last micro-batch with data.
    """

    def __init__(self, wrapped: Wrapped, *, grads: UnderBackward) -> None:
        # Starts and ends of module calls, in this micro-batch and in the last with data.
        self._calls: list[tuple[nn.Module, tuple[Unit, ...], bool]] = []
        self._last_calls: list[tuple[nn.Module, tuple[Unit, ...], bool]] = []
        super().__init__(wrapped, grads=grads)

    def repeat_forward(self) -> None:
        """Repeat the gathers from the last forward, without running it.

        The end of backward then passes its uses in reverse, as usual.

        Raises:
            UsageError: If this rank had no forward yet.
        """
        # Other ranks run a forward now, and their gathers must pair with gathers here.
        if not self._last_calls:
            raise UsageError(
                "expected a forward on this rank before it joins a micro-batch without data, "
                "because it repeats the gathers of that forward, got none. Give every rank data in "
                "the first micro-batch, or choose a stage below 3."
            )
        # enable_grad, because the hooks record uses only with gradients.
        with torch.enable_grad():
            for module, needed, begins in self._last_calls:
                if begins:
                    self._before_forward(needed, module, ())
                else:
                    self._after_forward(needed, module, (), None)

    def finish_backward(self) -> None:
        """End a backward."""
        super().finish_backward()
        # A micro-batch without calls keeps the earlier recording.
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
    """Take part in a micro-batch without data on this rank, with zero gradients.

    Call it in place of begin_last_micro_batch, forward, backward and end_micro_batch.

    Args:
        ddp: Built with `UnevenStepCount` and, if it shards params, `RepeatableOnUse`.
        last: See `end_micro_batch`.
        count: See `finish_grad_sync`.

    Raises:
        UsageError: As in these methods; if `ddp` has another step count; or if params are sharded
            and this rank had no data yet, so the gather order is unknown.
    """
    if not isinstance(ddp.step_count, UnevenStepCount):
        raise UsageError(
            "expected an UnevenStepCount for a micro-batch without data, because it determines the "
            "divisor, got a StepCount. Pass seams=Seams(step_count=UnevenStepCount)."
        )
    ddp.step_count.join()
    # Without a forward, nothing else waits for the gathers in flight.
    ddp.finish_param_gather()
    # Only OnUse schedules issue gathers in forward.
    if isinstance(ddp.param_schedule, RepeatableOnUse):
        ddp.param_schedule.repeat_forward()
    # After the forward, as on ranks with data, because it may contain a collective.
    if last or ddp.config.sync == "every":
        ddp.begin_last_micro_batch(count=count)
    ddp.end_micro_batch(last, count=count)
