"""Replay of one rank's computation: each micro-batch separately, in its own shape."""
# The global batch at once would be faster but wrong: another batch split gives other bits.

from __future__ import annotations

import hashlib
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from zero_sim.host.device import random_state, seed_device, set_random_state
from zero_sim.reference.scaling import LossFactors
from zero_sim.scenario.spec import Scenario
from zero_sim.workloads import Batch, Workload, loss_terms, seed_of, total_loss


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroReplay:
    """Forward and backward of one micro-batch on one rank."""

    loss: Tensor  # 0D
    """Unscaled sum of the loss terms."""
    term_count: int
    """Number of loss terms: 2 if the model has a second loss."""
    grads: dict[str, Tensor]  # each ND, the param's shape and grad_dtype
    """Gradients of the scaled loss, by param; without params that the loss does not reach."""
    rows: int
    digest: bytes
    """Hash of the batch's bytes, taken before the forward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReplay:
    """One rank's micro-batches in one step."""

    losses: tuple[Tensor, ...]  # each 0D
    has_second_loss: bool
    """True if losses have a second term."""
    rounds: tuple[dict[str, Tensor], ...]  # each ND, the param's shape, grad dtype
    """The rank's terms for each reduction in the step, by param: a single round with accumulated
    gradients, or a round per micro-batch if `system.sync` is `every`."""
    micro_grads: tuple[dict[str, Tensor], ...]  # each ND, dtype of the param's own gradient
    """Micro-batch gradients by param, without params that the loss does not reach. Empty if not
    requested."""
    reached: frozenset[str]
    """Params that the loss of any micro-batch reaches."""
    rows: int
    """Rows in all its micro-batches."""
    data_digest: bytes
    """Hash of the rank's batches, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NonFinite:
    """The first gradient element that is NaN or infinite."""

    rank: int
    micro: int
    param: str
    index: int
    """Element index within the flattened param."""
    value: float


@contextmanager
def isolated() -> Generator[None]:
    """Compute on a single thread, then restore the caller's random state and thread count."""
    # A single thread, because fp32 linear layers give other bits on two. Set here, because a count
    # set in another thread does not bind MKL here.
    threads = torch.get_num_threads()
    random_states = torch.default_generator.get_state(), random_state()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.default_generator.set_state(random_states[0])
        set_random_state(random_states[1])
        if threads != 1:
            torch.set_num_threads(threads)


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayer:
    """Replays ranks on one module. Ranks with the same weights can share it."""

    scenario: Scenario
    workload: Workload
    module: nn.Module
    params: Mapping[str, nn.Parameter]
    """Trained params by name. Backward skips params that are currently frozen."""
    scales: Mapping[str, Tensor] = field(default_factory=dict)  # each 0D fp32
    """The module's own fp8 scales, by param."""

    def replay_rank(
        self,
        *,
        step: int,
        rank: int,
        grad_dtype: torch.dtype | None,
        scales: Sequence[LossFactors | None],
        keep_micro: bool = False,
        every: bool | None = None,
    ) -> RankReplay:
        """Run one rank's micro-batches and accumulate their gradients, in order.

        Params that no micro-batch reaches get zero gradients. So do all params in a round for which
        the rank has no data.

        Args:
            step: Optimizer step, from 0.
            rank: Rank whose data is used.
            grad_dtype: Accumulation dtype, to which each sum is rounded; None for each param's own
                gradient dtype.
            scales: Loss factors of each micro-batch; None for 1.
            keep_micro: True to return each micro-batch's gradients as well.
            every: True if each micro-batch is a round; None for the scenario's setting.
        """
        every = self.scenario.system.sync == "every" if every is None else every
        replays: list[MicroReplay] = []

        def replay_all() -> Iterator[Mapping[str, Tensor]]:
            for micro, scale in enumerate(scales):
                replay = self.replay_micro(step=step, rank=rank, micro=micro, scale=scale)
                replays.append(replay)
                yield replay.grads

        # One at a time, so that the gradients of all micro-batches are not in memory together.
        rounds = self.accumulate(replay_all(), self.params, grad_dtype=grad_dtype, every=every)
        return RankReplay(
            losses=tuple(replay.loss for replay in replays),
            has_second_loss=any(replay.term_count > 1 for replay in replays),
            rounds=tuple(rounds),
            micro_grads=tuple(replay.grads for replay in replays) if keep_micro else (),
            reached=frozenset().union(*(replay.grads for replay in replays)),
            rows=sum(replay.rows for replay in replays),
            data_digest=_join([replay.digest for replay in replays]),
        )

    def accumulate(
        self,
        micros: Iterable[Mapping[str, Tensor]],
        names: Iterable[str],
        *,
        grad_dtype: torch.dtype | None,
        every: bool,
    ) -> list[dict[str, Tensor]]:
        """Add micro-batch gradients in order; see `RankReplay.rounds`.

        Params in `names` without terms get zeros. With `every`, each micro-batch is a round.
        """
        # A round for each micro-batch of the step, even if this rank has no data for it.
        rounds: list[dict[str, Tensor]] = [
            {} for _ in range(self.scenario.run.micro_batches if every else 1)
        ]
        for micro, grads in enumerate(micros):
            totals = rounds[micro if every else 0]
            for name, grad in grads.items():
                # Start with the first term, because zero plus -0.0 is +0.0.
                term = grad if grad_dtype is None else grad.to(grad_dtype)
                totals[name] = totals[name] + term if name in totals else term
        # A rank joins every sum of its params, if only with zeros.
        for totals in rounds:
            for name in [each for each in names if each not in totals]:
                param = self.params[name]
                dtype = grad_dtype or param.grad_dtype or param.dtype
                totals[name] = torch.zeros(param.shape, dtype=dtype, device=param.device)
        return rounds

    def replay_micro(
        self, *, step: int, rank: int, micro: int, scale: LossFactors | None = None
    ) -> MicroReplay:
        """Run one micro-batch's forward and backward, with the seed of the system's rank."""
        batch = self.workload.batch(step=step, rank=rank, micro=micro)
        # Before the forward, which may write to its inputs.
        rows, digest = batch.rows, digest_batch(batch)
        # Like torch.manual_seed on a CPU, without its visit to every other kind of device.
        seed = seed_of(self.scenario, step=step, rank=rank, micro=micro)
        torch.default_generator.manual_seed(seed)
        seed_device(batch.inputs.device, seed)
        # The caller may have disabled gradients.
        with torch.enable_grad():
            terms = loss_terms(self.workload, self.module, batch)
            loss = total_loss(terms)
            scaled = loss if scale is None else scale.scaled(terms)
        # Without frozen params, because autograd.grad refuses them.
        wanted = {name: param for name, param in self.params.items() if param.requires_grad}
        grads: dict[str, Tensor] = {}
        # A loss may reach no trained param.
        if wanted and scaled.requires_grad:
            found = torch.autograd.grad(scaled, tuple(wanted.values()), allow_unused=True)
            grads = {
                name: grad for name, grad in zip(wanted, found, strict=True) if grad is not None
            }
        return MicroReplay(
            loss=loss.detach(), term_count=len(terms), grads=grads, rows=rows, digest=digest
        )

    def freeze(self, names: Collection[str]) -> None:
        """Exclude the named params from backward, and include all others."""
        for name, param in self.params.items():
            param.requires_grad_(name not in names)

    def find_nonfinite(
        self, *, step: int, rank: int, scales: Sequence[LossFactors | None]
    ) -> NonFinite | None:
        """Find a rank's first NaN or infinity, in order of micro-batches, params and elements."""
        # A second, deterministic replay, so that a healthy run pays nothing for the search.
        for micro, scale in enumerate(scales):
            replay = self.replay_micro(step=step, rank=rank, micro=micro, scale=scale)
            for name, grad in replay.grads.items():
                bad = _first_nonfinite(grad)
                if bad is not None:
                    index, value = bad
                    return NonFinite(rank=rank, micro=micro, param=name, index=index, value=value)
        return None


def digest_batch(batch: Batch) -> bytes:
    """Return a hash of a batch's bytes."""
    targets = () if batch.targets is None else (batch.targets,)
    tensors = (batch.inputs, *targets, *batch.extra)
    # numpy has no bf16, so pass the bytes.
    return _hash(
        *(tensor.reshape(-1).view(torch.uint8).cpu().numpy().tobytes() for tensor in tensors)
    )


def _join(digests: Sequence[bytes]) -> bytes:
    return digests[0] if len(digests) == 1 else _hash(*digests)


def _hash(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=8).digest()


def _first_nonfinite(values: Tensor) -> tuple[int, float] | None:
    """Return the flat index and the value of the first NaN or infinity."""
    flat = values.reshape(-1)
    where = flat.isfinite().logical_not().nonzero()
    if not len(where):
        return None
    index = int(where[0])
    return index, float(flat[index])
