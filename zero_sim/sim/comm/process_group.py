"""The process group that torch.distributed calls. Each method makes a `Call`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Store, Work

from zero_sim.errors import UsageError
from zero_sim.sim.call import SPARSE, Call
from zero_sim.sim.callsite import call_site
from zero_sim.sim.comm import tensor_lists
from zero_sim.sim.comm.arguments import (
    as_list,
    as_rows,
    check_alike,
    check_can_fold,
    check_coalesced,
    check_contiguous,
    check_dense,
    check_gathered,
    check_gathered_coalesced,
    check_like,
    check_no_rows,
    check_one,
    check_pairs,
    check_rows,
    check_some,
    check_sparse_sum,
    factor_of,
    reduce_op_of,
    root_of,
    root_tensor_of,
    splits_of,
)
from zero_sim.sim.comm.backend_options import DEFAULT_TIMEOUT, SimBackend
from zero_sim.sim.comm.cluster_protocol import Cluster
from zero_sim.sim.comm.plain_memory import (
    check_writable,
    inner_calls,
    inner_tensors,
    is_plain,
    memory_of,
    storages_of,
)
from zero_sim.sim.comm.rendezvous import Group
from zero_sim.sim.comm.timeouts import after_monitored, check_monitored, seconds_of
from zero_sim.sim.dispatch import count_in_modes
from zero_sim.sim.failures import TimedOut


def _asynchronous(opts: Any) -> bool:
    return bool(getattr(opts, "asyncOp", False))


_OF_TORCH = ("gloo", "nccl", "mpi", "ucc", "xccl", "threaded")
"""Backends whose name torch knows."""


class SimProcessGroup(ProcessGroup):
    """A member's view of a group of simulated ranks."""

    def __init__(self, cluster: Cluster, group: Group, group_rank: int) -> None:
        # torch's stub lacks the constructor for subclasses, (rank, size).
        super().__init__(group_rank, len(group.ranks))  # pyrefly: ignore
        self._cluster = cluster
        self._group = group
        self._group_rank = group_rank
        # A list between `_start_coalescing` and `_end_coalescing`.
        self._coalescing: list[Work] | None = None
        # Set by `shutdown`, because a program may keep the object after that.
        self._destroyed = False
        self._store: Store | None = None
        self.set_backend("sim")

    def size(self) -> int:
        """Return the number of members."""
        return len(self._group.ranks)

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """The members' world ranks, in group-rank order."""
        return self._group.ranks

    @property
    def owner(self) -> int:
        """World rank of the member that owns this view."""
        return self._group.ranks[self._group_rank]

    def getBackendName(self) -> str:
        """Return `sim`."""
        # For `gloo`, torch's C++ would expect its own ProcessGroupGloo object.
        return "sim"

    def name(self) -> str:
        """Return the requested backend's name; `custom` for third-party backends, as in torch."""
        name = self._backend.name()
        return name if name in _OF_TORCH else "custom"

    @property
    def group_name(self) -> str:
        """Name of the group in c10d."""
        return self._group.name

    @property
    def group_desc(self) -> str:
        """Name of the group in records."""
        return self._group.label

    def getGroupName(self) -> str:
        """Return `group_name`, for callers in C++."""
        return self._group.name

    def set_backend(self, backend: str, *, timeout: timedelta | None = None) -> None:
        """Give this group the name and time-out (None for gloo's) of the requested backend."""
        self._backend = SimBackend(self, name=backend, timeout=timeout or DEFAULT_TIMEOUT)

    @property
    def _is_gloo(self) -> bool:
        return self._backend.name() == "gloo"

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._backend._set_default_timeout(timeout)

    def _get_backend(self, device: torch.device) -> SimBackend:
        # torch's message and error type, because programs may expect them.
        kinds = [each.type for each in self._device_types]
        if torch.device(device).type not in kinds:
            raise RuntimeError(
                f"No backend type associated with device type {torch.device(device).type}: the "
                f"simulated group has {', '.join(kinds)}"
            )
        return self._backend

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self._cluster.device_kinds()]

    @property
    def options(self) -> Any:
        """The backend's options."""
        return self._backend.options

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out for barriers."""
        self._backend.set_timeout(timeout)

    def get_group_store(self) -> Store | None:
        """Return the members' store."""
        return self._store

    def set_group_store(self, store: Store) -> None:
        """Set the members' store."""
        self._store = store

    def _get_sequence_number_for_group(self) -> int:
        return self._group.issued_by(self._group_rank)

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing, because all members count their calls from 0."""

    def _wait_for_pending_works(self) -> None:
        """Do nothing, because the owner of each work waits for it."""

    def split_group(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise UsageError, because only NCCL can split a communicator."""
        raise UsageError(
            f"expected new_group, got split_group of group {self._group.label}, which only NCCL "
            "has. Call dist.new_group(ranks) on every rank: its collectives are the same."
        )

    merge_remote_group = split_group

    def shutdown(self) -> None:
        """Mark this side as destroyed. Later uses raise."""
        self._destroyed = True
        self._cluster.note_destroyed(self._group, self._group_rank)

    def abort(self) -> None:
        """Note the abort. No communication has to be aborted."""
        self._cluster.note_aborted(self._group, self._group_rank)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._coalescing = self._coalescing or [], None
        return self._cluster.join_works(self._group.ranks[self._group_rank], works)

    def _issue(
        self,
        kind: str,
        opts: Any,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] = (),
        **parts: Any,
    ) -> Work:
        self._check_open(kind)
        count_in_modes(kind, coalesced=len(inputs) > 1)
        if is_plain(inputs) and is_plain(outputs):
            return self._collect(self._issue_plain(kind, opts, inputs, outputs, **parts))
        works: list[Work] = []
        used: set[int] = set()
        for each_inputs, each_outputs in inner_calls(inputs, outputs):
            storages = storages_of([*each_inputs, *each_outputs])
            if used & storages:
                # A wrapper may hold the same tensor twice, but calls in flight must not share
                # memory.
                works[-1].wait()
            used |= storages
            works.append(self._issue_plain(kind, opts, each_inputs, each_outputs, **parts))
        return self._collect(self._join(works))

    def _issue_plain(
        self,
        kind: str,
        opts: Any,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        **parts: Any,
    ) -> Work:
        # Errors show the program's call site, not torch's wrapper.
        file, line = call_site()
        call = Call(
            kind=kind,
            inputs=memory_of(inputs),
            outputs=memory_of(outputs),
            factor=factor_of(opts),
            file=file,
            line=line,
            **parts,
        )
        # In strict groups, the contract refuses such tensors and names both ranks' call sites.
        if not self._group.strict:
            check_writable(call, group_rank=self._group_rank)
        asynchronous = _asynchronous(opts)
        return self._cluster.issue(self._group, self._group_rank, call, asynchronous=asynchronous)

    def _join(self, works: Sequence[Work]) -> Work:
        if len(works) == 1:
            return works[0]
        return self._cluster.join_works(self._group.ranks[self._group_rank], works)

    def _check_open(self, kind: str) -> None:
        if self._destroyed:
            raise self._cluster.used_after_destroy(self._group, self._group_rank, kind)

    def _collect(self, work: Work) -> Work:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def allreduce(
        self,
        tensors: Sequence[Tensor] | Tensor,
        opts: Any = None,
        timeout: Any = None,
        *,
        op: Any = None,
    ) -> Work:
        """Reduce in place. DistributedDataParallel's C++ reducer calls this too."""
        tensors, opts = as_list(tensors), opts if op is None else op
        check_some("allreduce", tensors)
        check_alike("allreduce", tensors)
        if len(tensors) == 1:
            return self._all_reduce("allreduce", tensors, opts)
        # Several tensors: reduce them into the first, all-reduce the first, and copy it back.
        check_can_fold("allreduce", reduce_op_of(opts))
        tensor_lists.fold(tensors, reduce_op_of(opts))
        work = self._all_reduce("allreduce", tensors[:1], opts)
        return self._end(work, lambda: tensor_lists.spread(tensors[0], tensors), tensors)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Run several all-reduces as one call."""
        check_coalesced("allreduce_coalesced", tensors)
        if not self._group.strict:
            # gloo reduces copies, so the list may contain a tensor twice.
            first = {id(tensor): index for index, tensor in reversed(list(enumerate(tensors)))}
            tensors = [
                tensor if first[id(tensor)] == index else tensor.detach().clone()
                for index, tensor in enumerate(tensors)
            ]
        return self._all_reduce("allreduce_coalesced", tensors, opts)

    def _end(self, work: Work, bring: Callable[[], None], result: Sequence[Any]) -> Work:
        """Wait for a work, then copy its result to the rank's other tensors."""
        work.wait()
        bring()
        return self._cluster.join_works(self.owner, [work], result=result)

    def _all_reduce(self, method: str, tensors: Sequence[Tensor], opts: Any) -> Work:
        if len(tensors) == 1 and tensors[0].is_sparse:
            check_sparse_sum(method, reduce_op_of(opts))
            return self._issue(SPARSE, opts, tensors, reduce_op=reduce_op_of(opts))
        check_dense(method, tensors)
        return self._issue("all_reduce", opts, tensors, reduce_op=reduce_op_of(opts))

    def reduce(
        self,
        tensors: Sequence[Tensor] | Tensor,
        opts: Any = None,
        op: Any = None,
        timeout: Any = None,
        *,
        root: int | None = None,
    ) -> Work:
        """Reduce into the root's tensor."""
        tensors = as_list(tensors)
        check_one("reduce", tensors, side="")
        check_dense("reduce", tensors)
        # Direct calls pass (tensor, root, op), torch.distributed passes options.
        rooted = opts if root is None else root
        reducing = op if isinstance(rooted, int) else opts
        return self._issue(
            "reduce",
            reducing,
            tensors,
            reduce_op=reduce_op_of(reducing),
            root=root_of("reduce", rooted, self.size()),
        )

    def broadcast(
        self,
        tensors: Sequence[Tensor] | Tensor,
        opts: Any = None,
        timeout: Any = None,
        *,
        root: int | None = None,
    ) -> Work:
        """Copy the root's tensor to all ranks."""
        tensors, rooted = as_list(tensors), opts if root is None else root
        chosen = root_of("broadcast", rooted, self.size(), tensor_count=len(tensors))
        check_alike("broadcast", tensors)
        check_dense("broadcast", tensors)
        if len(tensors) == 1:
            return self._issue("broadcast", opts, tensors, root=chosen)
        # Several tensors: broadcast the first, after the root has copied its chosen tensor there.
        if chosen == self._group_rank:
            tensor_lists.spread(tensors[root_tensor_of(rooted)], tensors[:1])
        work = self._issue("broadcast", opts, tensors[:1], root=chosen)
        return self._end(work, lambda: tensor_lists.spread(tensors[0], tensors), tensors)

    def reduce_scatter(
        self,
        outputs: Sequence[Tensor] | Tensor,
        inputs: Sequence[Sequence[Tensor]] | Sequence[Tensor],
        opts: Any = None,
        timeout: Any = None,
        *,
        op: Any = None,
    ) -> Work:
        """List form: reduce all ranks' `inputs[0][r]` into rank `r`'s `outputs[0]`."""
        outputs, rows = as_list(outputs), as_rows(inputs)
        check_one("reduce_scatter", outputs, side="output")
        check_rows("reduce_scatter", rows, side="input", size=self.size())
        check_dense("reduce_scatter", [*outputs, *rows[0]])
        opts = opts if op is None else op
        return self._issue(
            "reduce_scatter_list", opts, rows[0], outputs=outputs, reduce_op=reduce_op_of(opts)
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Flat form: reduce chunk `r` of all inputs into rank `r`'s `output`."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    # [Note: two spellings] torch 2.13 calls `all_gather_single`, `reduce_scatter_single`,
    # `all_to_all_single` and their `_coalesced` forms. Older versions call `_allgather_base`,
    # `_reduce_scatter_base`, `alltoall_base`, `allgather_into_tensor_coalesced` and
    # `reduce_scatter_tensor_coalesced`. Both are defined.
    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """Run several flat reduce-scatters as one call."""
        check_pairs("reduce_scatter", outputs, inputs)
        op = reduce_op_of(opts)
        return self._issue("reduce_scatter", opts, inputs, outputs=outputs, reduce_op=op)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def allgather(
        self,
        outputs: Sequence[Sequence[Tensor]] | Sequence[Tensor],
        inputs: Sequence[Tensor] | Tensor,
        opts: Any = None,
        timeout: Any = None,
    ) -> Work:
        """List form: copy rank `r`'s `inputs[0]` into `outputs[0][r]`."""
        inputs, rows = as_list(inputs), as_rows(outputs)
        check_gathered("allgather", rows, inputs, size=self.size(), even=self._is_gloo)
        if len(inputs) == 1:
            return self._issue("all_gather_list", opts, inputs, outputs=rows[0])
        # Several inputs: gather in the layout of the coalesced form, then fill all rows.
        first = tensor_lists.by_input(rows[0], len(inputs))
        work = self._issue("all_gather_list", opts, inputs, outputs=first)

        def bring() -> None:
            # Every row gets all results, so all rows are equal.
            for places in zip(*rows, strict=True):
                tensor_lists.spread(places[0], places)

        return self._end(work, bring, [list(row) for row in rows])

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Run several list all-gathers as one: copy rank `r`'s `inputs[i]` into `outputs[r][i]`."""
        check_gathered_coalesced("allgather_coalesced", outputs, inputs, size=self.size())
        by_input = [row[index] for index in range(len(inputs)) for row in outputs]
        return self._issue("all_gather_list", opts, inputs, outputs=by_input)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Flat form: fill `output` with the ranks' inputs in rank order."""
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """Run several flat all-gathers as one call."""
        check_pairs("all_gather", outputs, inputs)
        return self._issue("all_gather", opts, inputs, outputs=outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self,
        outputs: Sequence[Sequence[Tensor]] | Sequence[Tensor],
        inputs: Sequence[Tensor] | Tensor,
        opts: Any = None,
        timeout: Any = None,
        *,
        root: int | None = None,
    ) -> Work:
        """Copy rank `r`'s `inputs[0]` into the root's `outputs[0][r]`."""
        inputs, rows = as_list(inputs), as_rows(outputs)
        chosen = root_of("gather", opts if root is None else root, self.size())
        check_one("gather", inputs, side="input")
        mine = self._rows_of_root("gather", rows, chosen, side="output")
        check_dense("gather", [*inputs, *mine])
        check_like("gather", mine, inputs[0], even=self._is_gloo)
        return self._issue("gather", opts, inputs, outputs=mine, root=chosen)

    def scatter(
        self,
        outputs: Sequence[Tensor] | Tensor,
        inputs: Sequence[Sequence[Tensor]] | Sequence[Tensor],
        opts: Any = None,
        timeout: Any = None,
        *,
        root: int | None = None,
    ) -> Work:
        """Copy the root's `inputs[0][r]` into rank `r`'s `outputs[0]`."""
        outputs, rows = as_list(outputs), as_rows(inputs)
        chosen = root_of("scatter", opts if root is None else root, self.size())
        check_one("scatter", outputs, side="output")
        mine = self._rows_of_root("scatter", rows, chosen, side="input")
        check_dense("scatter", [*outputs, *mine])
        check_like("scatter", mine, outputs[0], even=self._is_gloo)
        return self._issue("scatter", opts, mine, outputs=outputs, root=chosen)

    def _rows_of_root(
        self, method: str, rows: Sequence[Sequence[Tensor]], root: int, *, side: str
    ) -> Sequence[Tensor]:
        """Return the root's tensors for a gather or scatter; empty on other ranks."""
        if self._group_rank == root:
            check_rows(method, rows, side=side, size=self.size())
            return rows[0]
        check_no_rows(method, rows, side=side)
        return []

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """Copy rank `s`'s `inputs[r]` into rank `r`'s `outputs[s]`."""
        for side, tensors in (("output", outputs), ("input", inputs)):
            check_rows("alltoall", [tensors], side=side, size=self.size())
            check_dense("alltoall", tensors)
        return self._issue("all_to_all_list", opts, inputs, outputs=outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int] | Tensor,
        input_splits: list[int] | Tensor,
        opts: Any = None,
    ) -> Work:
        """Exchange rows of a tensor, like `alltoall`. Empty splits mean equal splits."""
        check_dense("alltoall_base", [output, input])
        if not self._group.strict:
            # Like gloo, which accepts non-contiguous tensors in all other calls.
            check_contiguous("all_to_all", [output, input])
        return self._issue(
            "all_to_all",
            opts,
            [input],
            outputs=[output],
            input_splits=splits_of(input_splits) or self._even_rows(input),
            output_splits=splits_of(output_splits) or self._even_rows(output),
        )

    alltoall_base = all_to_all_single

    def _even_rows(self, tensor: Tensor) -> list[int]:
        rows = tensor.shape[0] if tensor.dim() else 0
        # If the rows do not divide evenly, return a single split, whose count the contract refuses.
        share, left = divmod(rows, self.size())
        return [share] * self.size() if left == 0 else [rows]

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        """Wait for all members. The call's time-out applies; without one, the group's."""
        # Direct calls pass the time-out itself, torch passes options.
        seconds = seconds_of(timeout) or seconds_of(getattr(opts, "timeout", None))
        return self._come_together(opts, seconds or seconds_of(self._backend.options._timeout))

    def _come_together(self, opts: Any, seconds: float | None) -> Work:
        return self._issue("barrier", opts, [], timeout_seconds=seconds)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all members. Rank 0's error names absent ranks.

        Raises:
            BadArgument: The time-out is zero or negative.
            TimedOut: A member came too late.
        """
        check_monitored(timeout, group_rank=self._group_rank)
        # In gloo, only rank 0 has a time-out. It waits for the others, and they wait for it.
        seconds = None if self._group_rank else seconds_of(timeout)
        try:
            self._come_together(None, seconds).wait()
        except TimedOut as error:
            raise after_monitored(
                error,
                group_rank=self._group_rank,
                ranks=self._group.ranks,
                wait_all_ranks=wait_all_ranks,
            ) from None

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Work:
        """Send to a member. As with NCCL, a send is done when its receive is posted."""
        return self._exchange("send", tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Work:
        """Receive from a member."""
        return self._exchange("recv", tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Work:
        """Receive from the member that sends first."""
        return self._exchange("recv", tensors, None, tag)

    def _exchange(self, kind: str, tensors: list[Tensor], peer: int | None, tag: int) -> Work:
        self._check_open(kind)
        # torch's binding takes a list, but messages have a single tensor.
        (tensor,) = tensors
        works = []
        # A wrapper sends a message for each tensor inside.
        for part in memory_of(inner_tensors(tensor)):
            place = (self._group, self._group_rank)
            if kind == "send":
                assert peer is not None
                works.append(self._cluster.send(*place, peer, tag=tag, tensor=part))
            else:
                works.append(self._cluster.receive(*place, peer, tag=tag, tensor=part))
        return self._collect(self._join(works))
