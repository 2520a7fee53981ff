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
that ended before the first one began. Buckets that other numbers of ranks shard, as those of
experts, are counted apart, ahead and last, since not all ranks have as many of them.

Gradients of an arena (`zero_sim.cost.arena`) are in it, as long as they come in the order of
buckets, or each has a place of its own there.

Whatever is whole at a moment at which it may not be is a finding, and so is memory longer than the
bucket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from zero_sim.cost.arena import keeps_grads
from zero_sim.cost.forms import BucketForm, ParamSize, by_registration
from zero_sim.cost.hook_trace import readers_of, tell_arrival
from zero_sim.findings.phase import Phase
from zero_sim.findings.records import Finding
from zero_sim.scenario.checks import Check
from zero_sim.scenario.derived import overlaps_grads
from zero_sim.scenario.names import frozen_at
from zero_sim.scenario.spec import Scenario

Look = Callable[[], Iterable[tuple[str, str, int]]]
"""What is whole in memory now: `gradients` or `params`, a param of the bucket, bytes."""


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
    """What was due ahead of its use in backward."""

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

    def end(self, module: nn.Module, buckets: frozenset[int]) -> int:
        start = self.starts.pop()
        self.tick += 1
        self.in_use.subtract(buckets)
        for bucket in buckets:
            self.pending[bucket].discard(module)
        self.uses.append(_Use(start, self.tick, buckets))
        self.gathered = self.whole_in_forward()
        return len(self.uses) - 1

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


@dataclass(slots=True, eq=False, weakref_slot=True)
class PeakWatch:
    """Looks at one rank's memory at the moments of one step; see [Note: what may be whole].

    Args:
        forms: Its buckets, by the first registered param of each.
        scenario: The case as its dp-cp group sees it.
        rank: The rank, within the group.
        look: Tells what is whole in its memory.
        reads: Of its modules.
        index_of: By param the index of its bucket.
    """

    forms: Sequence[BucketForm]
    scenario: Scenario
    rank: int
    look: Look
    reads: _Reads
    index_of: Mapping[str, int]
    """By param the index of its bucket."""
    step: int = 0
    found: list[Finding] = field(default_factory=list)
    """The first one; nothing is looked at behind it."""
    _micro: int | None = None
    _filled: set[int] = field(default_factory=set)
    _were_in_order: bool = True
    """Whether no more gradients were whole at a time, in this step, than an arena has places for.
    """
    _arrived: set[str] = field(default_factory=set)

    def start(self, step: int, micro: int) -> None:
        """Note that a micro-batch begins."""
        self.step, self._micro = step, micro
        if micro == 0:
            self._filled.clear()
            self._were_in_order = True
        self._arrived.clear()
        reads = self.reads
        self.reads = _Reads(
            users=reads.users, prefetch=reads.prefetch, kept=reads.kept, sharers=reads.sharers
        )

    def end(self) -> None:
        """Note that the micro-batches of the step are done."""
        self._micro = None

    def _begin(self, buckets: frozenset[int], module: nn.Module, args: object) -> None:
        if self._micro is not None and self.reads.reached is None:
            self.reads.begin(buckets)
            self._check(Phase.FORWARD, f"{type(module).__name__} began")

    def _end(
        self, buckets: frozenset[int], module: nn.Module, args: object, output: object
    ) -> None:
        if self._micro is None or self.reads.reached is not None:
            return
        index = self.reads.end(module, buckets)
        self._check(Phase.FORWARD, f"{type(module).__name__} ended")
        for tensor in _tensors_in(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(partial(self._come_to, self.reads, index))

    def _come_to(self, reads: _Reads, index: int, grad: Tensor) -> None:
        if self._micro is not None and reads is self.reads:
            reads.come_to(index)
            self._check(Phase.BACKWARD, "backward came to a module")

    def _arrive(self, name: str) -> None:
        if self._micro is None:
            return
        self._arrived.add(name)
        self._filled.add(self.index_of[name])
        self._check(Phase.BACKWARD, f"the gradient of {name} arrived")

    def _whole_grads(self) -> set[int]:
        """The buckets whose gradients may be whole."""
        system, run = self.scenario.system, self.scenario.run
        if system.sync == "last" and self._micro != run.micro_batches - 1:
            return self._filled
        frozen = frozen_at(self.scenario.model, step=self.step)
        issued: list[int] = []
        for index in range(len(self.forms))[::-1]:
            missing = {*self.forms[index].names_with_elems} - frozen - self._arrived
            if not (self.reads.is_past(index) if system.stage == 3 else not missing):
                break
            issued.append(index)
        in_flight = issued[-1:] if overlaps_grads(system) else []
        return (self._filled - {*issued}) | {*in_flight}

    def _allowed_grads(self, what: str) -> set[int]:
        whole = self._whole_grads()
        if what == "gradients":
            return whole
        window = range(min(whole, default=0), max(whole, default=-1) + 1)
        places = 1 + overlaps_grads(self.scenario.system)
        self._were_in_order &= len(whole) == len(window) <= places
        return set() if self._were_in_order or keeps_grads(self.scenario) else whole

    def _check(self, phase: Phase, when: str) -> None:
        if self.found:
            return
        allowed: dict[str, set[int]] = {}
        for what, param, held in self.look():
            if not held:
                continue
            if what not in allowed:
                allowed[what] = (
                    self.reads.whole() if what == "params" else self._allowed_grads(what)
                )
            index = self.index_of[param]
            form = self.forms[index]
            bytes_each = form.param_bytes if what == "params" else form.grad_bytes
            owed = form.elems * bytes_each if index in allowed[what] else 0
            if held > owed:
                self.found.append(
                    Finding(
                        check=Check.INVARIANT_MEMORY,
                        step=self.step,
                        rank=self.rank,
                        phase=phase,
                        param=param,
                        message=f"this rank holds {held} bytes of whole {what} of the "
                        f"bucket of {', '.join(form.names[:3])} as {when} in micro-batch "
                        f"{self._micro}, expected {owed} by the closed form of its stage",
                    )
                )
                return


def watch_peaks(
    module: nn.Module,
    *,
    names: Mapping[Tensor, str],
    sizes: Sequence[ParamSize],
    scenario: Scenario,
    rank: int,
    look: Look,
) -> PeakWatch:
    """Put hooks on a module, behind those of the system that trains it.

    Args:
        module: What the system was given to train, after it was built.
        names: Its params by the names that they had before.
        sizes: What the rank trains, in registration order.
        scenario: The case as its dp-cp group sees it.
        rank: Rank in that group.
        look: Tells what is whole in the rank's memory.
    """
    forms = by_registration(sizes, scenario=scenario, rank=rank)
    readers = {reader: read for reader, read in readers_of(module, names=names).items() if reader}
    buckets = {
        reader: frozenset(
            index for index, form in enumerate(forms) if not read.isdisjoint(form.names_with_elems)
        )
        for reader, read in {module: frozenset[str](), **readers}.items()
    }
    users = {
        index: frozenset(reader for reader, own in buckets.items() if index in own)
        for index in range(len(forms))
    }
    system = scenario.system
    last = frozenset(index for index, form in enumerate(forms) if form.is_last)
    watch = PeakWatch(
        forms=forms,
        scenario=scenario,
        rank=rank,
        look=look,
        index_of={name: index for index, form in enumerate(forms) for name in form.names},
        reads=_Reads(
            users=users,
            prefetch=1 if system.prefetch is None else system.prefetch,
            kept=last if system.reshard_after_forward else frozenset(users),
            sharers=[form.group_size for form in forms],
        ),
    )
    for param, name in names.items():
        if param.requires_grad and param.numel():
            tell_arrival(param, watch._arrive, name=name)
    if system.stage == 3:
        for reader, own in buckets.items():
            reader.register_forward_pre_hook(partial(watch._begin, own))
            reader.register_forward_hook(partial(watch._end, own))
    return watch


def _tensors_in(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors_in(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _tensors_in(value)
