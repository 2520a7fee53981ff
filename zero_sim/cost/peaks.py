"""Memory peaks within a step: allowed bytes of unsharded gradients and params, against measured.

Between steps, stages 2 and 3 have only shards in memory (`zero_sim.cost.memory`). They save memory
only if unsharded tensors are also released within the step. Release is due at certain starts and
ends of modules, and when gradients arrive. The harness observes these by hooks that run after the
system's. It also needs the params in each bucket (`zero_sim.cost.forms`).

[Note: whole memory]
Here, *whole* means unsharded.

Gradients of a bucket may be whole from the first arrival until the next bucket in reduction order
is in flight; without overlap, until their own reduction. If gradients arrive in bucket order, one
bucket fills and another is in flight. So besides its shards, a rank has at most two buckets, for
any depth of the model. A bucket with missing gradients delays all later buckets.

Params of a bucket may be whole (stage 3):
    forward    from the start of the first module that reads the bucket, or of a module up to
               `system.prefetch` buckets earlier, to the end of the last such module.
    between    only the last bucket; without `reshard_after_forward`, all buckets.
    backward   from the output of the last module that reads the bucket, or up to `system.prefetch`
               buckets earlier, until backward reaches a module that ended before the first reader
               began. With activation checkpoints, also from the second start of a reader.

Expert buckets may have shard groups of another size. Prefetch and the last bucket are counted
separately for each size, because ranks may differ in the number of such buckets.

Gradients lie inside an arena (`zero_sim.cost.memory`) if they arrive in bucket order, or if each
bucket has its own span.

Memory that is whole at any other moment is a finding, and so is memory longer than its bucket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from zero_sim.cost.forms import BucketForm, ParamSize, by_registration
from zero_sim.cost.hook_trace import readers_of
from zero_sim.cost.memory import keeps_grads
from zero_sim.cost.memory_recorder import MemoryRecorder, Moment
from zero_sim.findings.dataflow import Phase
from zero_sim.findings.records import Finding
from zero_sim.scenario.checks import Check
from zero_sim.scenario.derived import overlaps_grads
from zero_sim.scenario.names import frozen_at
from zero_sim.scenario.spec import Scenario

_PHASES = {"begin": Phase.FORWARD, "end": Phase.FORWARD}
"""Phases of moments; all other moments are in backward."""


@dataclass(frozen=True, slots=True)
class _Use:
    """A call of a module that reads buckets. A tick is the start or end of a module."""

    start: int
    stop: int
    buckets: frozenset[int]


@dataclass(slots=True, eq=False)
class _Reads:
    """Buckets whose params may be whole, derived from a micro-batch's module calls."""

    users: Mapping[int, frozenset[nn.Module]]
    prefetch: int
    kept: frozenset[int]
    """Buckets that stay whole between forward and backward."""
    sharers: Sequence[int]
    """Shard group size by bucket. Buckets with equal size share a prefetch order."""
    tick: int = 0
    starts: list[int] = field(default_factory=list)
    pending: dict[int, set[nn.Module]] = field(default_factory=dict)
    """Modules that have not run yet in this forward, by bucket."""
    in_use: Counter[int] = field(default_factory=Counter)
    gathered: set[int] = field(default_factory=set)
    uses: list[_Use] = field(default_factory=list)
    reached: int | None = None
    """Index of the earliest use that backward has reached; None before backward."""
    ahead: set[int] = field(default_factory=set)
    """Buckets that backward prefetched, or that a module which runs again reads."""

    def begin(self, buckets: frozenset[int]) -> None:
        if not self.starts:
            # If the outermost module starts, a new forward begins, with all readers pending.
            self.pending = {bucket: set(users) for bucket, users in self.users.items()}
        self.starts.append(self.tick)
        self.tick += 1
        self.in_use.update(buckets)
        self.gathered |= buckets
        for ranks in {self.sharers[bucket] for bucket in buckets}:
            # Prefetch follows registration order, separately for each shard group size.
            last = max(self._of(ranks, buckets))
            following = self._of(ranks, range(last + 1, len(self.sharers)))[: self.prefetch]
            # A bucket without pending readers will not be read again, so it is not prefetched.
            self.gathered |= {bucket for bucket in following if self.pending.get(bucket)}

    def end(self, module: nn.Module, buckets: frozenset[int]) -> None:
        start = self.starts.pop()
        self.tick += 1
        self.in_use.subtract(buckets)
        for bucket in buckets:
            self.pending[bucket].discard(module)
        self.uses.append(_Use(start, self.tick, buckets))
        # Reshard buckets without a running or pending reader.
        self.gathered = self.unsharded_in_forward()

    def unsharded_in_forward(self) -> set[int]:
        # A module reads the bucket now, or the model runs and a reader is pending.
        used = {b for b in self.gathered if self.in_use[b] or (self.starts and self.pending[b])}
        return used | (self.gathered & self.kept)

    def come_to(self, index: int) -> None:
        """Advance backward to the output of a use."""
        now = len(self.uses) if self.reached is None else self.reached
        # Backward skips outputs without a gradient, so all uses in between count as reached.
        for passed in range(now - 1, index - 1, -1):
            coming = dict.fromkeys(
                # Buckets of earlier uses, in the order that backward needs them.
                bucket
                for use in self.uses[:passed][::-1]
                for bucket in use.buckets
                if bucket not in self.uses[passed].buckets
            )
            # A use's buckets are prefetched together, in any order.
            due: list[int] = []
            for ranks in {self.sharers[bucket] for bucket in self.uses[passed].buckets}:
                due += self._of(ranks, coming)[: self.prefetch]
            self.ahead |= {
                bucket
                for use in self.uses[:passed]
                if not use.buckets.isdisjoint(due)
                for bucket in use.buckets
            }
        self.reached = min(now, index)

    def _of(self, ranks: int, buckets: Iterable[int]) -> list[int]:
        """Select the buckets with shard groups of this size."""
        return [bucket for bucket in buckets if self.sharers[bucket] == ranks]

    def is_past(self, bucket: int) -> bool:
        """Return True if backward has passed all uses of a bucket."""
        firsts = [use.start for use in self.uses if bucket in use.buckets]
        if self.reached is None or self.reached == len(self.uses) or not firsts:
            return False
        # Passed if backward is at a use that ended before the bucket's first use began.
        return min(firsts) >= self.uses[self.reached].stop

    def whole(self) -> set[int]:
        if self.reached is None:
            return self.unsharded_in_forward()
        # In backward: buckets that are reached, prefetched or kept, until passed.
        come = {bucket for use in self.uses[self.reached :] for bucket in use.buckets}
        may = come | self.ahead | (self.gathered & self.kept)
        return {bucket for bucket in may if not self.is_past(bucket)}


@dataclass(slots=True, eq=False)
class _Replay:
    """State of the closed form during a step; see [Note: whole memory]."""

    forms: Sequence[BucketForm]
    """The rank's buckets, in order of their first registered param."""
    index_of: Mapping[str, int]
    """Bucket index by param."""
    scenario: Scenario
    step: int
    reads: _Reads
    """State in the current micro-batch."""
    micro: int | None = None
    filled: set[int] = field(default_factory=set)
    were_in_order: bool = True
    """True if all whole gradients in this step so far fit into an arena's spans."""
    arrived: set[str] = field(default_factory=set)

    def take(self, moment: Moment, *, buckets: Mapping[nn.Module, frozenset[int]]) -> None:
        """Advance by one moment; `buckets` has the buckets that each module reads."""
        if moment.micro != self.micro:
            self.micro = moment.micro
            self.arrived.clear()
            reads = self.reads
            # Params are gathered anew in each micro-batch, but gradients may accumulate.
            self.reads = _Reads(
                users=reads.users, prefetch=reads.prefetch, kept=reads.kept, sharers=reads.sharers
            )
        if moment.what == "begin" and moment.module is not None:
            self.reads.begin(buckets[moment.module])
        elif moment.what == "end" and moment.module is not None:
            self.reads.end(moment.module, buckets[moment.module])
        elif moment.what == "again" and moment.module is not None:
            self.reads.ahead |= buckets[moment.module]
        elif moment.what == "reach":
            self.reads.come_to(moment.end)
        elif moment.what == "grad":
            self.arrived.add(moment.param)
            self.filled.add(self.index_of[moment.param])

    def excess(self, moment: Moment) -> tuple[BucketForm, str, str, int, int] | None:
        """Return the first whole memory in excess; None if there is none.

        Args:
            moment: The current moment.

        Returns:
            Bucket, kind of memory, param, bytes found, bytes allowed.
        """
        allowed: dict[str, set[int]] = {}
        for what, param, held in moment.whole:
            if what not in allowed:
                # Compute this once per kind, and only if the engine reports the kind.
                allowed[what] = (
                    self.reads.whole() if what == "params" else self._allowed_grads(what)
                )
            index = self.index_of[param]
            form = self.forms[index]
            bytes_each = form.param_bytes if what == "params" else form.grad_bytes
            wanted = form.elems * bytes_each if index in allowed[what] else 0
            if held > wanted:
                return form, what, param, held, wanted
        return None

    def _whole_grads(self) -> set[int]:
        """Return the buckets whose gradients may be whole."""
        system, run = self.scenario.system, self.scenario.run
        if system.sync == "last" and self.micro != run.micro_batches - 1:
            # All gradients accumulate, because only the last micro-batch reduces.
            return self.filled
        frozen = frozen_at(self.scenario.model, step=self.step)
        issued: list[int] = []
        # In reduction order, which is the reverse of registration order.
        for index in range(len(self.forms))[::-1]:
            missing = {*self.forms[index].names_with_elems} - frozen - self.arrived
            # Stage 3 reduces when backward has passed the bucket's modules, even without gradients.
            if not (self.reads.is_past(index) if system.stage == 3 else not missing):
                break
            issued.append(index)
        # Only the last issued reduction may be in flight, and only with overlap.
        in_flight = issued[-1:] if overlaps_grads(system) else []
        return (self.filled - {*issued}) | {*in_flight}

    def _allowed_grads(self, what: str) -> set[int]:
        whole = self._whole_grads()
        if what == "gradients":
            return whole
        window = range(min(whole, default=0), max(whole, default=-1) + 1)
        # "In order" means contiguous in reduction order, with at most one bucket in flight. Such
        # gradients lie inside the arena, so none may be whole outside of it.
        places = 1 + overlaps_grads(self.scenario.system)
        self.were_in_order &= len(whole) == len(window) <= places
        return set() if self.were_in_order or keeps_grads(self.scenario) else whole


def _check_peaks(
    moments: Sequence[Moment],
    *,
    replay: _Replay,
    buckets: Mapping[nn.Module, frozenset[int]],
    rank: int,
) -> Iterator[Finding]:
    for moment in moments:
        # Other closed forms check checkpoints and staged gradients.
        if moment.what in ("forward", "update"):
            continue
        replay.take(moment, buckets=buckets)
        excess = replay.excess(moment)
        if excess is None:
            continue
        form, what, param, held, wanted = excess
        yield Finding(
            check=Check.INVARIANT_MEMORY,
            step=replay.step,
            rank=rank,
            phase=_PHASES.get(moment.what, Phase.BACKWARD),
            param=param,
            message=f"this rank holds {held} bytes of whole {what} of the "
            f"bucket of {', '.join(form.names[:3])} as {_in_words(moment)} in micro-batch "
            f"{moment.micro}, expected {wanted} by the closed form of its stage",
        )


def _in_words(moment: Moment) -> str:
    if moment.what == "grad":
        return f"the gradient of {moment.param} arrived"
    if moment.what == "reach":
        return "backward came to a module"
    how = {"begin": "began", "again": "began again"}.get(moment.what, "ended")
    return f"{type(moment.module).__name__} {how}"


def watch_own_peaks(
    recorder: MemoryRecorder,
    module: nn.Module,
    *,
    names: Mapping[Tensor, str],
    most: Mapping[str, int],
    rank: int,
) -> None:
    """Record whole memory during a step, and check it against a target's declared bounds.

    `most` has the bounds in bytes by name, such as `whole gradients`. Other arguments as for
    `watch_peaks`.
    """
    recorder.forms.append(partial(_check_most, most=most, step=recorder.step, rank=rank))
    recorder.watch_grads(names)
    readers = readers_of(module, names=names)
    recorder.watch_modules({module, *(reader for reader in readers if reader is not None)})


def _check_most(
    moments: Sequence[Moment], *, most: Mapping[str, int], step: int, rank: int
) -> Iterator[Finding]:
    """Check whole bytes at each moment against a target's declared bounds."""
    for moment in moments:
        # Sum over buckets, because a target's bounds are for the total.
        whole = Counter[str]()
        for what, _, held in moment.whole:
            whole[f"whole {what}"] += held
        for name, allowed in most.items():
            if whole[name] > allowed:
                yield Finding(
                    check=Check.INVARIANT_MEMORY,
                    step=step,
                    rank=rank,
                    phase=_PHASES.get(moment.what, Phase.BACKWARD),
                    message=f"this rank holds {whole[name]} bytes of {name} as "
                    f"{_in_words(moment)} in micro-batch {moment.micro}, expected at most "
                    f"{allowed} by the target's closed form",
                )


def watch_peaks(
    recorder: MemoryRecorder,
    module: nn.Module,
    *,
    names: Mapping[Tensor, str],
    sizes: Sequence[ParamSize],
    scenario: Scenario,
    rank: int,
) -> None:
    """Record a step's moments after the system's hooks, and check the peaks of its stage.

    Args:
        recorder: The step's recorder. It receives the closed form.
        module: The module passed to the system, after the system was built.
        names: Its params with their names in the bare model.
        sizes: The rank's trained params, in registration order.
        scenario: The dp-cp group's case.
        rank: Group rank.
    """
    forms = by_registration(sizes, scenario=scenario, rank=rank)
    readers = {reader: read for reader, read in readers_of(module, names=names).items() if reader}
    # The model's start and end delimit a forward, even if the model itself reads no bucket.
    buckets = {
        reader: frozenset(
            index for index, form in enumerate(forms) if not read.isdisjoint(form.names_with_elems)
        )
        for reader, read in {module: frozenset[str](), **readers}.items()
    }
    # Ignore modules whose params are all empty, because a system need not gather these.
    buckets = {reader: own for reader, own in buckets.items() if own or reader is module}
    users = {
        index: frozenset(reader for reader, own in buckets.items() if index in own)
        for index in range(len(forms))
    }
    system = scenario.system
    last = frozenset(index for index, form in enumerate(forms) if form.is_last)
    replay = _Replay(
        forms=forms,
        index_of={name: index for index, form in enumerate(forms) for name in form.names},
        scenario=scenario,
        step=recorder.step,
        reads=_Reads(
            users=users,
            # The default of `ZeroConfig.prefetch`.
            prefetch=1 if system.prefetch is None else system.prefetch,
            kept=last if system.reshard_after_forward else frozenset(users),
            sharers=[form.group_size for form in forms],
        ),
    )
    recorder.forms.append(partial(_check_peaks, replay=replay, buckets=buckets, rank=rank))
    recorder.watch_grads(names)
    # Below stage 3, params stay whole, so modules do not matter.
    if system.stage == 3:
        recorder.watch_modules(buckets)
