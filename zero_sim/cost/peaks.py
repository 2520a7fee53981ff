"""Peaks within a step: how much of whole gradients and params may be in memory, against what is.

Between steps stages 2 and 3 hold shards (`zero_sim.cost.memory`); what they save is saved only if
whole memory goes within the step, too. When it has to follows from when modules begin and end and
when gradients arrive, which the harness sees by hooks of its own behind those of the system, and
from which params lie together in a bucket (`zero_sim.cost.forms`).

[Note: what may be whole]
A bucket's gradients, from the first of them until the bucket behind it in the order of reductions
is on its way, or until it is reduced where nothing is overlapped. So with gradients that come in
the order of buckets one fills and one is in flight: beside its shards a rank holds no more than two
buckets, however deep the model. One whose gradients do not all come holds up those behind it.

A bucket's params (stage 3), in a forward: from the begin of the first module that reads it, or of
one up to `system.prefetch` buckets before it, to the end of the last one; what is kept for backward
beyond that: the last bucket, all without `reshard_after_forward`. In backward: from the output of
the last module that reads it, or up to as many buckets before, until backward comes to a module
that ended before the first one began; with a checkpoint also from the second begin of a module.
Buckets that other numbers of ranks shard, as those of
experts, are counted apart, ahead and last, since not all ranks have as many of them.

Gradients of an arena (`zero_sim.cost.memory`) are in it, as long as they come in the order of
buckets, or each has a place of its own there.

Whatever is whole at a moment at which it may not be is a finding, and so is memory longer than the
bucket.
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
"""Phase of each kind of moment; backward for all others."""


@dataclass(frozen=True, slots=True)
class _Use:
    """One call of a module that reads buckets, in the time of begins and ends."""

    start: int
    stop: int
    buckets: frozenset[int]


@dataclass(slots=True, eq=False)
class _Reads:
    """Which params may be whole: the calls of a micro-batch, and how far backward is."""

    users: Mapping[int, frozenset[nn.Module]]
    prefetch: int
    kept: frozenset[int]
    """Buckets that stay between forward and backward."""
    sharers: Sequence[int]
    """Of each bucket how many ranks shard it; those with as many are counted together."""
    tick: int = 0
    starts: list[int] = field(default_factory=list)
    pending: dict[int, set[nn.Module]] = field(default_factory=dict)
    """By bucket the modules that this forward has not come past."""
    in_use: Counter[int] = field(default_factory=Counter)
    gathered: set[int] = field(default_factory=set)
    uses: list[_Use] = field(default_factory=list)
    reached: int | None = None
    """Index of the earliest use that backward has come to; None before it began."""
    ahead: set[int] = field(default_factory=set)
    """What was due ahead of its use in backward, or is read by a module that runs again."""

    def begin(self, buckets: frozenset[int]) -> None:
        if not self.starts:
            self.pending = {bucket: set(users) for bucket, users in self.users.items()}
        self.starts.append(self.tick)
        self.tick += 1
        self.in_use.update(buckets)
        self.gathered |= buckets
        for ranks in {self.sharers[bucket] for bucket in buckets}:
            last = max(self._of(ranks, buckets))
            following = self._of(ranks, range(last + 1, len(self.sharers)))[: self.prefetch]
            self.gathered |= {bucket for bucket in following if self.pending.get(bucket)}

    def end(self, module: nn.Module, buckets: frozenset[int]) -> None:
        start = self.starts.pop()
        self.tick += 1
        self.in_use.subtract(buckets)
        for bucket in buckets:
            self.pending[bucket].discard(module)
        self.uses.append(_Use(start, self.tick, buckets))
        self.gathered = self.whole_in_forward()

    def whole_in_forward(self) -> set[int]:
        used = {b for b in self.gathered if self.in_use[b] or (self.starts and self.pending[b])}
        return used | (self.gathered & self.kept)

    def come_to(self, index: int) -> None:
        """Backward has the gradient of what a use returned."""
        now = len(self.uses) if self.reached is None else self.reached
        for passed in range(now - 1, index - 1, -1):
            coming = dict.fromkeys(
                bucket
                for use in self.uses[:passed][::-1]
                for bucket in use.buckets
                if bucket not in self.uses[passed].buckets
            )
            # Several buckets of one use come together, in no order that is told.
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
        """Those of some buckets that so many ranks shard."""
        return [bucket for bucket in buckets if self.sharers[bucket] == ranks]

    def is_past(self, bucket: int) -> bool:
        """Whether backward has come past every use of a bucket."""
        firsts = [use.start for use in self.uses if bucket in use.buckets]
        if self.reached is None or self.reached == len(self.uses) or not firsts:
            return False
        return min(firsts) >= self.uses[self.reached].stop

    def whole(self) -> set[int]:
        if self.reached is None:
            return self.whole_in_forward()
        come = {bucket for use in self.uses[self.reached :] for bucket in use.buckets}
        may = come | self.ahead | (self.gathered & self.kept)
        return {bucket for bucket in may if not self.is_past(bucket)}


@dataclass(slots=True, eq=False)
class _Replay:
    """The moments of a step, one after another; see [Note: what may be whole]."""

    forms: Sequence[BucketForm]
    """Buckets of the rank, by the first registered param of each."""
    index_of: Mapping[str, int]
    """By param the index of its bucket."""
    scenario: Scenario
    step: int
    reads: _Reads
    """Reads of the micro-batch."""
    micro: int | None = None
    filled: set[int] = field(default_factory=set)
    were_in_order: bool = True
    """True if no more gradients were whole at a time, in this step, than an arena has places for.
    """
    arrived: set[str] = field(default_factory=set)

    def take(self, moment: Moment, *, buckets: Mapping[nn.Module, frozenset[int]]) -> None:
        """Take what happened at a moment into account.

        Args:
            moment: The next one.
            buckets: By module the buckets that it reads.
        """
        if moment.micro != self.micro:
            self.micro = moment.micro
            self.arrived.clear()
            reads = self.reads
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
        """Return the first whole memory that may not be there; None if there is none.

        Args:
            moment: The last one.

        Returns:
            The bucket, what it is of, the param, the bytes that are there and those that may be.
        """
        allowed: dict[str, set[int]] = {}
        for what, param, held in moment.whole:
            if what not in allowed:
                allowed[what] = (
                    self.reads.whole() if what == "params" else self._allowed_grads(what)
                )
            index = self.index_of[param]
            form = self.forms[index]
            bytes_each = form.param_bytes if what == "params" else form.grad_bytes
            owed = form.elems * bytes_each if index in allowed[what] else 0
            if held > owed:
                return form, what, param, held, owed
        return None

    def _whole_grads(self) -> set[int]:
        """The buckets whose gradients may be whole."""
        system, run = self.scenario.system, self.scenario.run
        if system.sync == "last" and self.micro != run.micro_batches - 1:
            return self.filled
        frozen = frozen_at(self.scenario.model, step=self.step)
        issued: list[int] = []
        for index in range(len(self.forms))[::-1]:
            missing = {*self.forms[index].names_with_elems} - frozen - self.arrived
            if not (self.reads.is_past(index) if system.stage == 3 else not missing):
                break
            issued.append(index)
        in_flight = issued[-1:] if overlaps_grads(system) else []
        return (self.filled - {*issued}) | {*in_flight}

    def _allowed_grads(self, what: str) -> set[int]:
        whole = self._whole_grads()
        if what == "gradients":
            return whole
        window = range(min(whole, default=0), max(whole, default=-1) + 1)
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
    """Check what was whole at every moment against what may be."""
    for moment in moments:
        if moment.what in ("forward", "update"):
            continue
        replay.take(moment, buckets=buckets)
        excess = replay.excess(moment)
        if excess is None:
            continue
        form, what, param, held, owed = excess
        yield Finding(
            check=Check.INVARIANT_MEMORY,
            step=replay.step,
            rank=rank,
            phase=_PHASES.get(moment.what, Phase.BACKWARD),
            param=param,
            message=f"this rank holds {held} bytes of whole {what} of the "
            f"bucket of {', '.join(form.names[:3])} as {_in_words(moment)} in micro-batch "
            f"{moment.micro}, expected {owed} by the closed form of its stage",
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
    """Record whole memory when gradients arrive and modules begin and end, against bounds.

    Args:
        recorder: Records it, and gets the bounds.
        module: As for `watch_peaks`.
        names: As for `watch_peaks`.
        most: Most bytes at any moment, by names such as `whole gradients`.
        rank: Rank in its dp-cp group.
    """
    recorder.forms.append(partial(_check_most, most=most, step=recorder.step, rank=rank))
    recorder.watch_grads(names)
    readers = readers_of(module, names=names)
    recorder.watch_modules({module, *(reader for reader in readers if reader is not None)})


def _check_most(
    moments: Sequence[Moment], *, most: Mapping[str, int], step: int, rank: int
) -> Iterator[Finding]:
    """Check the bytes that were whole at every moment against a target's own bounds."""
    for moment in moments:
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
    """Record the moments that the peaks of a stage depend on, behind the hooks of the system.

    Args:
        recorder: Records them, and gets the closed form.
        module: What the system was given to train, after it was built.
        names: Its params by the names that they had before.
        sizes: What the rank trains, in registration order.
        scenario: The case as its dp-cp group sees it.
        rank: Rank in that group.
    """
    forms = by_registration(sizes, scenario=scenario, rank=rank)
    readers = {reader: read for reader, read in readers_of(module, names=names).items() if reader}
    buckets = {
        reader: frozenset(
            index for index, form in enumerate(forms) if not read.isdisjoint(form.names_with_elems)
        )
        for reader, read in {module: frozenset[str](), **readers}.items()
    }
    # No system has to watch a module of which no param has elements.
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
            prefetch=1 if system.prefetch is None else system.prefetch,
            kept=last if system.reshard_after_forward else frozenset(users),
            sharers=[form.group_size for form in forms],
        ),
    )
    recorder.forms.append(partial(_check_peaks, replay=replay, buckets=buckets, rank=rank))
    recorder.watch_grads(names)
    if system.stage == 3:
        recorder.watch_modules(buckets)
