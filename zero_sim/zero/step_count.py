"""The count that divides a step's gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from zero_sim.errors import UsageError
from zero_sim.zero.collectives import all_reduce_sum, size_and_rank
from zero_sim.zero.config import ZeroConfig
from zero_sim.zero.division import set_divisor


class StepCount:
    """A step's count. `fix` determines it and writes it into the divisor, once per step.

    Args:
        config: Determines the counted quantity, and the time of the division.
        group: All training ranks; rows are summed over them.
        divisor: 0D fp32, overwritten with each step's count.
    """

    micro_batches: int
    """Number of micro-batches ended in this step."""

    def __init__(self, config: ZeroConfig, *, group: dist.ProcessGroup, divisor: Tensor) -> None:
        self._config = config
        self._group = group
        self._world_size, _ = size_and_rank(group)
        self._divisor = divisor
        self.reset()

    def reset(self) -> None:
        """Start a new step; the divisor keeps its value until the next `fix`."""
        self.micro_batches = 0
        self._rows = 0
        self._rows_counted = False
        # None until `fix`.
        self._count: int | None = None

    def add_rows(self, rows: int) -> None:
        """Count rows on this rank.

        Raises:
            UsageError: If `rows` is not a count, or the step's rows were summed already.
        """
        # type(), because bool is a subclass of int.
        if type(rows) is not int or rows < 0:
            raise UsageError(
                f"expected a number of rows of at least 0, got {rows!r} "
                f"(type={type(rows).__name__})."
            )
        if self._rows_counted:
            raise UsageError(
                f"expected rows before they are counted, got {rows} more afterwards. Call "
                f"add_rows() before begin_last_micro_batch() and before the end of the step."
            )
        self._rows += rows

    def fix(self, given: int | Tensor | None, *, last: bool) -> None:
        """Determine the count. A second call in a step only checks that the count is equal.

        A collective if `given` is None and `divide_by="tokens"`.

        Args:
            given: The caller's own count, equal on every rank; None to count as configured.
            last: True if the current micro-batch is the step's last.

        Raises:
            UsageError: If the count is not a positive integer that fp32 can represent, or differs
                from an earlier count in this step.
        """
        count = None if given is None else _to_integer(given)
        # Every rank calls fix() at the same points, so the collective inside _take() pairs up.
        if self._count is None:
            self._count = self._take(last=last) if count is None else count
            set_divisor(self._divisor, self._count)
        elif count is not None and count != self._count:
            raise UsageError(
                f"expected the count {self._count}, because gradients of this step were already "
                f"divided by it, got {count}. Pass the final count to begin_last_micro_batch()."
            )

    def end_micro_batch(self, *, last: bool) -> None:
        """Count a micro-batch.

        Raises:
            UsageError: If the step has more or fewer micro-batches than configured.
        """
        ended, expected = self.micro_batches + 1, self._config.micro_batches
        if expected is not None and (ended > expected or last != (ended == expected)):
            raise UsageError(
                f"expected {expected} micro-batches in a step, as configured, got "
                f"{ended} so far, {'ending' if last else 'not ending'} the step. "
                f"Set micro_batches=None, or to the real number."
            )
        self.micro_batches = ended

    def _take(self, *, last: bool) -> int:
        if self._config.divide_by == "ranks":
            return self._world_size
        if self._config.divide_by == "micro-batches":
            running = self.micro_batches + 1
            # ZeroConfig requires the number for a division before the last micro-batch.
            expected = running if last else self._config.micro_batches
            assert expected is not None
            return self._world_size * expected
        self._rows_counted = True
        # A collective over all training ranks.
        return self._sum_over_ranks(self._rows)

    def _sum_over_ranks(self, own: int) -> int:
        # int64: a sum of rows in fp32 would round above 2**24.
        counted = torch.tensor(own, dtype=torch.int64, device=self._divisor.device)
        all_reduce_sum(counted, group=self._group)
        return int(counted)


def _to_integer(count: int | Tensor) -> int:
    value = count.item() if isinstance(count, Tensor) else count
    # The remainder of infinity or NaN is NaN, so both are refused here; int() would raise its own.
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:
        raise UsageError(f"expected the count to be a whole number, got {count!r}.")
    return int(value)
