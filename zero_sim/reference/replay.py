"""What each rank computes on its own: its micro-batches, one by one, at their own shapes.

The global batch in one go would be faster and wrong: another batch split gives other bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zero_sim.scenario.spec import Scenario
from zero_sim.workloads import Batch, Workload, seed_of


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroReplay:
    """Forward and backward of one micro-batch of one rank."""

    loss: Tensor  # 0D
    grads: tuple[Tensor | None, ...]  # each ND, the param's shape and dtype
    """One per param, in order; None for a param that the loss does not reach."""
    digest: bytes
    """Hash of the batch's bytes, taken before the forward sees it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReplay:
    """All micro-batches of one rank in one step."""

    losses: tuple[Tensor, ...]  # each 0D
    grads: dict[str, Tensor]  # each ND, the param's shape, grad dtype
    """The accumulated local gradient of each param."""
    data_digest: bytes
    """Hash of the bytes of the rank's batches, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NonFinite:
    """Where a gradient first stopped being a number that training can use."""

    rank: int
    micro: int
    param: str
    index: int
    """Element within the flattened param."""
    value: float


@contextmanager
def isolated() -> Generator[None]:
    """Compute on one thread and leave the caller's random state and thread count as they were.

    One thread, because linear layers in fp32 give other bits on two; set here, because a count set
    in another thread does not bind MKL in this one.
    """
    threads = torch.get_num_threads()
    random_state = torch.default_generator.get_state()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.default_generator.set_state(random_state)
        if threads != 1:
            torch.set_num_threads(threads)


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayer:
    """Replays ranks on one module: all ranks hold the same weights, so one copy serves them all."""

    scenario: Scenario
    workload: Workload
    module: nn.Module
    params: Mapping[str, nn.Parameter]
    """The params to differentiate by; every one of `module` that is trained."""

    def replay_rank(self, *, step: int, rank: int, grad_dtype: torch.dtype | None) -> RankReplay:
        """Run all micro-batches of one rank and accumulate their gradients, in order.

        A param that no micro-batch reaches has a gradient of zeros.

        Args:
            step: Optimizer step, from 0.
            rank: Rank whose data is used.
            grad_dtype: Dtype of the accumulated gradients, which each addition is rounded to; None
                for each param's own.
        """
        totals: dict[str, Tensor] = {}
        losses: list[Tensor] = []
        digests: list[bytes] = []
        for micro in range(self.scenario.run.micro_batches):
            replay = self.replay_micro(step=step, rank=rank, micro=micro)
            for name, grad in zip(self.params, replay.grads, strict=True):
                if grad is None:
                    continue
                # Zero plus the first term is that term, but for the sign of a zero.
                term = grad if grad_dtype is None else grad.to(grad_dtype)
                totals[name] = totals[name] + term if name in totals else term
            losses.append(replay.loss)
            digests.append(replay.digest)
        for name, param in self.params.items():
            if name not in totals:
                totals[name] = torch.zeros(param.shape, dtype=grad_dtype or param.dtype)
        return RankReplay(losses=tuple(losses), grads=totals, data_digest=_hash(*digests))

    def replay_micro(self, *, step: int, rank: int, micro: int) -> MicroReplay:
        """Run one micro-batch forward and backward, from the seed that the system's rank uses."""
        batch = self.workload.batch(step=step, rank=rank, micro=micro)
        digest = digest_batch(batch)
        # What torch.manual_seed does on a CPU, without its look at every other kind of device.
        torch.default_generator.manual_seed(
            seed_of(self.scenario, step=step, rank=rank, micro=micro)
        )
        with torch.enable_grad():
            loss = self.workload.loss(self.module, batch)
        grads: tuple[Tensor | None, ...] = (None,) * len(self.params)
        if loss.requires_grad:
            grads = torch.autograd.grad(loss, tuple(self.params.values()), allow_unused=True)
        return MicroReplay(loss=loss.detach(), grads=grads, digest=digest)

    def find_nonfinite(self, *, step: int, rank: int) -> NonFinite | None:
        """Replay a rank's step until a micro-batch yields a NaN or an infinity; None if none does.

        Micro-batches are tried in order, then params and elements. Searching by a second,
        deterministic replay costs a healthy run nothing.
        """
        for micro in range(self.scenario.run.micro_batches):
            grads = self.replay_micro(step=step, rank=rank, micro=micro).grads
            for name, grad in zip(self.params, grads, strict=True):
                bad = None if grad is None else _first_nonfinite(grad)
                if bad is not None:
                    index, value = bad
                    return NonFinite(rank=rank, micro=micro, param=name, index=index, value=value)
        return None


def digest_batch(batch: Batch) -> bytes:
    """Return a hash of a batch's bytes."""
    tensors = [batch.inputs] if batch.targets is None else [batch.inputs, batch.targets]
    # numpy knows no bf16, so the bits go over as bytes.
    return _hash(*(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors))


def _hash(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=8).digest()


def _first_nonfinite(values: Tensor) -> tuple[int, float] | None:
    """Return flat index and value of the first NaN or infinity."""
    flat = values.reshape(-1)
    where = flat.isfinite().logical_not().nonzero()
    if not len(where):
        return None
    index = int(where[0])
    return index, float(flat[index])
