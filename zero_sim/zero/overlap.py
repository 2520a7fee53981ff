"""Communication while the rank computes: reductions under backward, gathers under forward.

[Note: one order for all ranks]
Ranks meet in collectives by the order in which each issues them. Gradients arrive in an order that
differs between ranks, as soon as they differ in which params they use, and on some ranks never. So
a bucket that is ready still waits for all before it in one fixed order, which follows from the
layout alone; what never became ready is issued at the end, in that order too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import nn

from zero_sim.errors import ModelError, UsageError
from zero_sim.zero.buffer import Bucket, Buffer


class OverlapMeter:
    """How many collectives of this rank were in flight while it computed.

    In flight is what was issued and not waited for. A pipeline that waits for each collective right
    after issuing it has the same values as one that overlaps, and a mean of 0 here.
    """

    def __init__(self) -> None:
        self._grads: list[int] = []
        self._params: list[int] = []

    def sample_grads(self, in_flight: int) -> None:
        """Note the reductions in flight when backward finished one more gradient."""
        self._grads.append(in_flight)

    def sample_params(self, in_flight: int) -> None:
        """Note the gathers in flight when the forward of one more module began."""
        self._params.append(in_flight)

    @property
    def grads_mean(self) -> float:
        """Mean number of reductions in flight; 0 where nothing was overlapped."""
        return sum(self._grads) / max(1, len(self._grads))

    @property
    def params_mean(self) -> float:
        """Mean number of gathers in flight; 0 where nothing was overlapped."""
        return sum(self._params) / max(1, len(self._params))


def order_by_forward(
    buffers: Sequence[Buffer], *, params: Sequence[nn.Parameter]
) -> tuple[Bucket, ...]:
    """Return the buckets in the order in which a forward is expected to need them.

    That of their first registered param, whatever the order of params inside a buffer; reversed it
    is the order in which backward is expected to complete them.

    Args:
        buffers: All buffers of a model.
        params: Their params in registration order.
    """
    place_of = {param: place for place, param in enumerate(params)}
    first_place: dict[Bucket, int] = {}
    for buffer in buffers:
        for param in buffer.memory:
            bucket = buffer.bucket_of(param)
            if bucket is not None:
                first_place[bucket] = min(place_of[param], first_place.get(bucket, len(params)))
    return tuple(sorted(first_place, key=first_place.__getitem__))


class GradPipeline:
    """Reduces each bucket as soon as it is ready; see [Note: one order for all ranks].

    Args:
        buckets: All buckets, in the order in which they are to be issued.
        bucket_of: The bucket of each param that has elements.
        before_sum: Called with a bucket right before it is issued.
        meter: Where the overlap is noted.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        bucket_of: Mapping[nn.Parameter, Bucket],
        before_sum: Callable[[Bucket], None],
        meter: OverlapMeter,
    ) -> None:
        self._buckets = buckets
        self._bucket_of = bucket_of
        self._before_sum = before_sum
        self._meter = meter
        self._missing: dict[Bucket, set[nn.Parameter]] = {}
        self._issued_count = 0
        self._issued: set[Bucket] = set()
        self.running = False

    def begin(self) -> None:
        """Issue buckets from now on; to be called before the backward that completes them."""
        self._missing = {bucket: set() for bucket in self._buckets}
        for param, bucket in self._bucket_of.items():
            # A param that is frozen now gets no gradient and nobody has to wait for it.
            if param.requires_grad:
                self._missing[bucket].add(param)
        self.running = True
        self._issue_ready()

    def check_open(self, param: nn.Parameter, *, name: str) -> None:
        """Refuse a gradient whose bucket is on its way already; else note the overlap.

        Raises:
            UsageError: If the bucket was issued.
        """
        if not self.running:
            return
        self._meter.sample_grads(sum(bucket.reducing for bucket in self._buckets))
        if self._bucket_of.get(param) in self._issued:
            raise UsageError(
                f"Expected one gradient of {name!r} in the last micro-batch but got another one "
                f"after its bucket was sent. Try one backward between begin_last_micro_batch() and "
                f"end_micro_batch(), or overlap_grads=False."
            )

    def mark_ready(self, param: nn.Parameter) -> None:
        """Note that a gradient is complete, and issue what became ready by it."""
        bucket = self._bucket_of.get(param)
        if self.running and bucket is not None:
            self._missing[bucket].discard(param)
            self._issue_ready()

    def finish(self) -> None:
        """Issue the rest and wait until every bucket is reduced."""
        while self._issued_count < len(self._buckets):
            self._issue_next()
        # Second sums are issued together, in order too, so that they overlap each other.
        for bucket in self._buckets:
            bucket.chain_reduce()
        for bucket in self._buckets:
            bucket.finish_reduce()
        self._issued_count = 0
        self._issued.clear()
        self.running = False

    def _issue_ready(self) -> None:
        while self._issued_count < len(self._buckets):
            if self._missing[self._buckets[self._issued_count]]:
                return
            self._issue_next()

    def _issue_next(self) -> None:
        bucket = self._buckets[self._issued_count]
        self._before_sum(bucket)
        bucket.start_reduce()
        self._issued.add(bucket)
        self._issued_count += 1


class ParamPipeline:
    """Gathers all buckets in the background, each waited for before a module uses it.

    Args:
        module: The whole model; hooks are put on its modules.
        buckets: All buckets, in the order in which they are to be issued.
        bucket_of: The bucket of each param that has elements.
        meter: Where the overlap is noted.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        buckets: Sequence[Bucket],
        bucket_of: Mapping[nn.Parameter, Bucket],
        meter: OverlapMeter,
    ) -> None:
        self._buckets = buckets
        self._bucket_of = bucket_of
        self._meter = meter
        self._unsampled: set[nn.Module] = set()
        self._hooked: set[nn.Module] = set()
        users = find_users(module)
        for user, params in users.items():
            needed = {bucket_of[param]: None for param in params if param in bucket_of}
            if user is not None and needed:
                self._hooked.add(user)
                user.register_forward_pre_hook(partial(self._before_forward, tuple(needed)))
        # Nothing tells when these are used, so that they are never left in flight.
        self._unguarded = {bucket_of[param] for param in users.get(None, ()) if param in bucket_of}

    def start(self) -> None:
        """Issue the gathers."""
        self._unsampled = set(self._hooked)
        for bucket in self._buckets:
            bucket.start_gather()
        for bucket in self._buckets:
            if bucket in self._unguarded:
                bucket.finish_gather()

    def finish(self) -> None:
        """Wait for all gathers."""
        for bucket in self._buckets:
            bucket.finish_gather()

    def check_waited(self, param: nn.Parameter, *, name: str) -> None:
        """Refuse a gradient of a param that nobody waited for: forward read an old value.

        Raises:
            ModelError: If the gather of the param is still in flight.
        """
        bucket = self._bucket_of.get(param)
        if bucket is not None and bucket.gathering:
            raise ModelError(
                f"Expected {name!r} to be used by the forward of a module that it belongs to but "
                f"got a gradient of it although no such forward waited for its gather. "
                f"Try finish_param_gather() before forward, or overlap_params=False."
            )

    def _before_forward(self, needed: Sequence[Bucket], module: nn.Module, args: object) -> None:
        for bucket in needed:
            bucket.finish_gather()
        # A module that runs again, for another micro-batch, has nothing left to overlap with.
        if module in self._unsampled:
            self._unsampled.discard(module)
            self._meter.sample_params(sum(bucket.gathering for bucket in self._buckets))


def find_users(module: nn.Module) -> dict[nn.Module | None, list[nn.Parameter]]:
    """Return by module the params that its forward may read.

    Those that it owns itself, and those of containers below it that have no forward, such as
    `nn.ParameterList`. None stands for params above which there is no module with a forward.
    """
    users: dict[nn.Module | None, list[nn.Parameter]] = {}
    seen: set[tuple[nn.Module, nn.Module | None]] = set()

    def visit(member: nn.Module, above: nn.Module | None) -> None:
        user = member if _has_forward(member) else above
        if (member, user) in seen:
            return
        seen.add((member, user))
        # Attention reads its output projection's params without calling it.
        reads_below = isinstance(member, nn.MultiheadAttention)
        users.setdefault(user, []).extend(member.parameters(recurse=reads_below))
        for child in member.children():
            visit(child, user)

    visit(module, None)
    return users


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)
