"""Compares everything a rank holds with the reference, after every step.

A judge is called by the rank programs themselves, one rank at a time, right after a step and before
anything else changes the state; so nothing is copied unless a difference is found.

Where every rank is a process of its own, each has a judge that observes that one rank and hears of
the others what they say before their first step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain

from torch import Tensor

from zero_sim.reference import (
    POSITION_FREE,
    Addresses,
    Orders,
    Reference,
    ReferenceStep,
    encode,
    step_together,
)
from zero_sim.scenario.spec import Scenario
from zero_sim.targets import Numerics, OwnedPart, Place, StepResult
from zero_sim.targets.adapt import PARTS
from zero_sim.verify import findings, invariants
from zero_sim.verify.compare import same_bits
from zero_sim.verify.facts import Facts
from zero_sim.verify.harness import AskedEngine
from zero_sim.verify.memory import bytes_held, check_memory
from zero_sim.verify.owed import Row, count_rows
from zero_sim.verify.positions import sum_spans
from zero_sim.verify.records import Finding, Strip
from zero_sim.verify.seen import Seen
from zero_sim.verify.strips import build_strip
from zero_sim.verify.volume import ParamSize, StepWindow
from zero_sim.workloads.fp8 import SCALE_SUFFIX


class Judge:
    """Judges one run; collects findings of the first step at which anything is wrong.

    Args:
        scenario: The case.
        reference: The oracle, at the step before `first_step`.
        first_step: The first step to judge, more than 0 after a checkpoint was reloaded.
        stop_step: The step before which this world ends; all of the case where left out.
        world_ranks: The ranks of the group that is judged, as findings name them.
        order_seed: Seed of the world, if it is not the scenario's.
        calls_made: How many calls the world has logged, for findings to say where in the log they
            stand; left out where there is no log.
        numerics: What the target declares; without it, gradients are told before the division.
        observed: The ranks, within the group, that this judge is shown; all where left out.

    Judges of one world that share a norm have to be told of each other by `seat_together`.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        reference: Reference,
        first_step: int = 0,
        stop_step: int | None = None,
        world_ranks: Sequence[int] | None = None,
        order_seed: int | None = None,
        calls_made: Callable[[], int] | None = None,
        numerics: Numerics | None = None,
        observed: Collection[int] | None = None,
    ) -> None:
        self.scenario = scenario
        self._numerics = numerics or Numerics()
        self.compared_elems = 0
        self.nonzero_fraction_max = 0.0
        self.same_data = scenario.world.size > 1
        self.has_stepped = False
        """Whether any step was taken, and on finite gradients: others prove nothing."""
        self.unobserved: set[str] = set()
        """What the engine could tell and does not, so that nothing is known of it."""
        self.uncertified_step: int | None = None
        """First step whose norm may round either way, so that nothing after clipping is owed."""
        self.owed: Counter[Row] = Counter()
        """Elements of the reduced gradients of all steps, by why they are owed."""
        self.windows: list[StepWindow] = []
        """Where the steps of all ranks lie in the event log."""
        self.sizes: dict[int, Sequence[ParamSize]] = {}
        """What each rank trains, if it is one that closed forms hold for."""
        self._call_count = calls_made or int
        self._calls_seen: dict[int, int] = {}
        self._skipped: dict[int, bool] = {}
        self._reference = reference
        self._steps: dict[int, ReferenceStep] = {}
        ranks = range(scenario.world.size) if observed is None else observed
        self._observed = dict.fromkeys(ranks, first_step - 1)
        """By rank that is shown: the last step at which it was."""
        self.first_step = first_step
        stop_step = scenario.run.steps if stop_step is None else stop_step
        # What leaks has done so after the second step. Weighing costs as much as comparing.
        self._weighed_step = min(first_step + 1, stop_step - 1)
        self.world_ranks: Sequence[int] = world_ranks or range(scenario.world.size)
        self._order_seed = scenario.run.seed if order_seed is None else order_seed
        self._calls_made = calls_made
        self._call_starts: dict[tuple[int, int], int] = {}
        self._places: dict[int, list[Place]] = {}
        self._parts: dict[int, list[OwnedPart]] = {}
        self._addresses: dict[int, Addresses] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._bad_step: int | None = None
        self._findings: list[Finding] = []
        self._panel: Sequence[Judge] = (self,)

    @staticmethod
    def seat_together(judges: Sequence[Judge]) -> None:
        """Let judges step their references together: every rank of all has built by then."""
        for judge in judges:
            judge._panel = judges

    def findings(self) -> tuple[Finding, ...]:
        """What was found at the first bad step, in the order in which an error travels."""
        return self.seen().merged()

    def seen(self) -> Seen:
        """All there is to say of this run, as plain data."""
        placed = (findings.with_index(found, self._shapes) for found in self._findings)
        return Seen(
            world_ranks=tuple(self.world_ranks),
            first_step=self.first_step,
            has_started=self.has_started,
            compared_elems=self.compared_elems,
            nonzero_fraction_max=self.nonzero_fraction_max,
            same_data=self.same_data,
            has_stepped=self.has_stepped,
            uncertified_step=self.uncertified_step,
            unobserved=frozenset(self.unobserved),
            owed=self.owed,
            bad_step=self._bad_step,
            findings=tuple(
                found if found.rank is None else replace(found, rank=self.world_ranks[found.rank])
                for found in placed
            ),
        )

    def strip(self) -> Strip | None:
        """The flat buffer of the first finding that lies in one."""
        seen = self.seen()
        for first in seen.merged():
            sharing = (ranks for ranks, names in self._sharings if first.param in names)
            places = {
                self.world_ranks[rank]: self._places[rank]
                for rank in next(sharing, ())
                if rank in self._places
            }
            found = [finding for finding in seen.findings if finding.check == first.check]
            strip = build_strip(first, found=found, places=places)
            if strip is not None:
                return strip
        return None

    def hear(self, rank: int, facts: Facts) -> None:
        """Note what a rank's engine says before the first step: who owns what, and where it lies.

        Args:
            rank: The rank, within the group.
            facts: What it says. Of every rank, also those that are not observed, before any steps.
        """
        self._places[rank] = list(facts.places)
        self._addresses[rank] = facts.addresses
        self._shapes |= facts.shapes
        self.unobserved |= facts.untold
        if self.has_started:
            self._reference.place([self._addresses[r] for r in sorted(self._addresses)])
            self._report(self.first_step, self._check_ownership())

    def hold_to_costs(self, rank: int, sizes: Sequence[ParamSize]) -> None:
        """Hold a rank to the closed forms of its stage.

        Args:
            rank: The rank, within the group.
            sizes: What it trains, as it was before its engine had it.
        """
        self.sizes[rank] = sizes
        self._calls_seen[rank] = self._call_count()

    @property
    def has_started(self) -> bool:
        """Whether every rank has built its engine and told of it."""
        return len(self._places) == self.scenario.world.size

    def _check_ownership(self) -> Iterator[Finding]:
        """Check who owns what: every element of a param once in each replica of its holders."""
        named = {
            rank: {**addresses, **{place.param: None for place in self._places[rank]}}
            for rank, addresses in self._addresses.items()
        }
        yield from invariants.check_holding(named, held=self._reference.held, step=self.first_step)
        for ranks, names in self._sharings if PARTS not in self.unobserved else ():
            yield from invariants.check_ownership(
                self._replicas(ranks, names),
                shapes={name: shape for name, shape in self._shapes.items() if name in names},
                step=self.first_step,
            )

    @cached_property
    def _sharings(self) -> list[tuple[tuple[int, ...], frozenset[str]]]:
        """The ranks that hold params together, and which: dense ones, and each share of experts.

        It is the reference that knows who is to hold what, never the system.
        """
        held = self._reference.held
        names_of: dict[tuple[int, ...], set[str]] = {}
        for name in frozenset[str]().union(*held):
            ranks = tuple(rank for rank, names in enumerate(held) if name in names)
            names_of.setdefault(ranks, set()).add(name)
        return [(ranks, frozenset(names)) for ranks, names in sorted(names_of.items())]

    def _replicas(
        self, ranks: Sequence[int], names: Collection[str]
    ) -> list[dict[int, list[Place]]]:
        """The ranks that hold all state of some params between them, replica by replica.

        Args:
            ranks: All that hold these params.
            names: The params; places of others are left out.
        """
        system = self.scenario.system
        replica_count = len(ranks) if system.stage == 0 else system.redundancy
        share = len(ranks) // replica_count
        return [
            {
                rank: [place for place in self._places[rank] if place.param in names]
                for rank in ranks[start : start + share]
            }
            for start in range(0, len(ranks), share)
        ]

    def before_backward(self, rank: int, step: int, engine: AskedEngine) -> None:
        """Look at a rank right before the first backward of a step."""
        if self._calls_made is not None:
            self._call_starts[rank, step] = self._calls_made()
            # Params of the step before may be looked at in this one.
            self._call_starts.pop((rank, step - 2), None)
        self._report(step, invariants.check_zero_gradients(engine, step=step, rank=rank))

    def observe(
        self,
        rank: int,
        step: int,
        losses: Sequence[Tensor],
        result: StepResult,
        engine: AskedEngine,
    ) -> None:
        """Judge all of a rank's state after a step.

        Args:
            rank: The rank.
            step: The step it has just done, from 0.
            losses: Its loss for each micro-batch.
            result: What its engine said of the step.
            engine: Its engine; params may still be in flight.
        """
        if self._bad_step is not None and step > self._bad_step:
            return
        expected = self._expected(step)
        if self.uncertified_step is None:
            self._report(step, self._compare_result(rank, step, result, expected))
            self._report(step, self._compare(rank, step, losses, engine, expected))
        self._close_window(rank, step)

    def _close_window(self, rank: int, step: int) -> None:
        """Note what the rank called since its last step ended."""
        start, stop = self._calls_seen.get(rank, 0), self._call_count()
        self._calls_seen[rank] = stop
        self.windows.append(
            StepWindow(
                rank=rank,
                world_rank=self.world_ranks[rank],
                step=step,
                start=start,
                stop=stop,
                skipped=self._skipped[step],
            )
        )

    def observe_params(self, rank: int, step: int, engine: AskedEngine) -> None:
        """Judge a rank's working params, once a step's gathers are done; last look at that step."""
        if (self._bad_step is None or step <= self._bad_step) and self.uncertified_step is None:
            self._report(step, self._compare_params(rank, step, engine, self._expected(step)))
            if rank in self.sizes and step == self._weighed_step:
                self._report(step, self._compare_memory(rank, step, engine))
        self._observed[rank] = step
        if min(self._observed.values()) >= step:
            self._steps.pop(step, None)

    def step_unseen(self) -> None:
        """Let the references of the whole panel take a step of which nothing is shown here."""
        self._advance()

    def _report(self, step: int, found: Iterator[Finding]) -> None:
        for finding in found:
            self._findings.append(self._dated(finding))
            self._bad_step = step if self._bad_step is None else min(self._bad_step, step)
        if self._bad_step is not None:
            # Only the first bad step tells where it began.
            self._findings = [f for f in self._findings if f.step in (None, self._bad_step)]

    def _dated(self, finding: Finding) -> Finding:
        """A finding with its place in the event log."""
        if self._calls_made is None:
            return finding
        started = None
        if finding.rank is not None and finding.step is not None:
            started = self._call_starts.get((finding.rank, finding.step))
        return replace(finding, call_start=started, call_stop=self._calls_made())

    def _expected(self, step: int) -> ReferenceStep:
        if step not in self._steps:
            self._advance()
        return self._steps[step]

    def _advance(self) -> None:
        """Take the next step of all references that share a norm."""
        orders = [judge._prepare() for judge in self._panel]
        taken = step_together(
            [judge._reference for judge in self._panel], orders, order_seed=self._order_seed
        )
        for judge, own in zip(self._panel, taken, strict=True):
            judge._take(own)

    def _prepare(self) -> Orders | None:
        """Save the steps that some rank has yet to see; return what the ring's order depends on."""
        for earlier, kept in self._steps.items():
            if min(self._observed.values()) < earlier:
                self._steps[earlier] = _frozen(kept)
        orders = None
        if self.scenario.world.order not in POSITION_FREE:
            orders = {name: [] for name in self._shapes}
            for ranks, names in self._sharings:
                # Replicas say the same; one of them is enough.
                places = self._replicas(ranks, names)[0].values()
                orders |= sum_spans(
                    chain.from_iterable(places), replica_count=self.scenario.system.redundancy
                )
        return orders

    def _take(self, taken: ReferenceStep) -> None:
        """Note a step that the reference has just done."""
        if self._observed:
            self._steps[taken.step] = taken
        self._skipped[taken.step] = taken.skipped
        self.nonzero_fraction_max = max(self.nonzero_fraction_max, taken.nonzero_fraction)
        if taken.norm.isfinite():
            self.owed += count_rows(
                taken,
                rank_count=self.scenario.world.size,
                replica_count=self.scenario.system.redundancy,
                order_known=self.scenario.world.order_known,
            )
        self.has_stepped |= not taken.skipped and bool(taken.norm.isfinite())
        self.same_data &= len(set(taken.data_digests.values())) == 1
        if not taken.norm_certified and self.scenario.optimizer.clip_norm is not None:
            self.uncertified_step = taken.step
        # With loss scaling an overflow is expected to be skipped, not to be reported.
        if taken.nonfinite is not None and self.scenario.optimizer.loss_scale is None:
            self._report(taken.step, iter([findings.nonfinite(taken.step, taken.nonfinite)]))

    def _compare_result(
        self, rank: int, step: int, result: StepResult, expected: ReferenceStep
    ) -> Iterator[Finding]:
        yield from self._compare_measured(rank, step, result, expected)
        told = {"norm": result.norm, "zeros": result.zeros, "skipped": result.skipped}
        self.unobserved.update(name for name, got in told.items() if got is None)
        spec = self.scenario.optimizer
        if result.norm is None and spec.clip_norm is not None:
            yield findings.said("norm", step, rank, expected=expected.norm.item(), got=None)
        if result.loss_scale is None and spec.loss_scale is not None:
            yield findings.said("loss_scale", step, rank, expected=expected.loss_scale, got=None)
        said = (("skipped", result.skipped), ("loss_scale", result.loss_scale))
        for name, got in said:
            wanted = getattr(expected, name)
            if got is not None and got != wanted:
                yield findings.said(name, step, rank, expected=wanted, got=got)

    def _compare_measured(
        self, rank: int, step: int, result: StepResult, expected: ReferenceStep
    ) -> Iterator[Finding]:
        """Compare what was measured of the whole gradient."""
        norm = result.norm if expected.norm_certified else None
        if norm is not None and self._differs(expected.norm, norm):
            yield findings.differing(findings.norm(step, rank), expected.norm, norm)
        if result.zeros is not None and result.zeros != expected.zeros:
            yield findings.said("zeros", step, rank, expected=expected.zeros, got=result.zeros)

    def _compare(
        self,
        rank: int,
        step: int,
        losses: Sequence[Tensor],
        engine: AskedEngine,
        expected: ReferenceStep,
    ) -> Iterator[Finding]:
        for micro, loss in enumerate(losses):
            if self._differs(expected.losses[rank, micro], loss):
                at = findings.loss(step, rank, micro)
                yield findings.differing(at, expected.losses[rank, micro], loss)
        # Views of live state, looked at once more when the params are there.
        self._parts[rank] = list(engine.parts())
        owned = [part.place for part in self._parts[rank]]
        yield from invariants.check_same_places(self._places[rank], owned, step=step, rank=rank)
        for part in self._parts[rank]:
            yield from self._compare_part(rank, step, part, expected)
        yield from invariants.check_padding(engine, step=step, rank=rank)
        yield from self._compare_told_gradients(rank, step, engine, expected)

    def _compare_told_gradients(
        self, rank: int, step: int, engine: AskedEngine, expected: ReferenceStep
    ) -> Iterator[Finding]:
        """Compare gradients of whole params, where the target declares that it shows them."""
        spec = self.scenario.optimizer
        changed = spec.clip_norm or spec.clip_value or spec.loss_scale
        if not self._numerics.grads_in_params or changed:
            if PARTS in self.unobserved:
                self.unobserved.add("reduced gradients")
            return
        told = engine.gradients()
        for name in self._reference.held[rank]:
            wanted, got = self._told(expected, name), told.get(name)
            if got is None:
                if wanted.any():
                    at = findings.gradient(step, rank, name)
                    yield replace(at, message="the system has no gradient of this param")
            elif self._differs(wanted, got):
                yield findings.differing(findings.gradient(step, rank, name), wanted, got)

    def _told(self, expected: ReferenceStep, name: str) -> Tensor:
        """A reduced gradient as the target is to tell it."""
        grad = expected.grads[name]
        if self._numerics.grads_told == "before-division" or expected.divisor == 1:
            return grad
        return grad / expected.divisor

    def _compare_params(
        self, rank: int, step: int, engine: AskedEngine, expected: ReferenceStep
    ) -> Iterator[Finding]:
        params, held = engine.params(), self._reference.held[rank]
        scales = _scales_of(engine, names=[name for name in expected.scales if name in held])
        for name, scale in scales.items():
            if scale is None:
                at = findings.scale(step, rank, name)
                yield replace(at, message="the system does not have the scale of this param")
            elif self._differs(expected.scales[name], scale):
                at = findings.scale(step, rank, name)
                yield findings.differing(at, expected.scales[name], scale)
        for part in self._parts[rank]:
            place = part.place
            if place.param not in params:
                continue  # Said below, for the whole param.
            working = params[place.param].reshape(-1)[place.start : place.stop]
            # With the rank's own scale: this is about what it holds, right or wrong.
            scale = scales.get(place.param)
            cast = (
                part.master.to(working.dtype)
                if scale is None
                else encode(part.master, scale=scale, dtype=working.dtype)
            )
            if self._differs(cast, working):
                at = findings.owned("invariant.cast", "", step, rank, place)
                yield findings.differing(at, cast, working)
        yield from self._compare_whole_params(rank, step, params, expected)
        yield from invariants.check_param_padding(engine, step=step, rank=rank)

    def _compare_whole_params(
        self, rank: int, step: int, params: Mapping[str, Tensor], expected: ReferenceStep
    ) -> Iterator[Finding]:
        """Compare the working params that a rank holds, those that others own included."""
        for name, value in expected.params.items():
            if name not in self._reference.held[rank]:
                continue
            if name not in params:
                at = findings.param(step, rank, name)
                yield replace(at, message="the system does not have this param")
            elif self._differs(value, params[name]):
                yield findings.differing(findings.param(step, rank, name), value, params[name])

    def _compare_memory(self, rank: int, step: int, engine: AskedEngine) -> Iterator[Finding]:
        owed = bytes_held(
            self.sizes[rank],
            scenario=self.scenario,
            rank=rank,
            # What state an element has was compared with the reference before.
            stored=sum(
                part.master.numel() * sum(value.dim() > 0 for value in part.state.values())
                for part in self._parts[rank]
            ),
        )
        yield from check_memory(engine.held_bytes(), owed, step=step, rank=rank)

    def _compare_part(
        self,
        rank: int,
        step: int,
        part: OwnedPart,
        expected: ReferenceStep,
    ) -> Iterator[Finding]:
        place = part.place
        name, start, stop = place.param, place.start, place.stop
        whole = stop - start == expected.masters[name].numel()

        def cut(tensor: Tensor) -> Tensor:
            flat = tensor.reshape(-1)
            return flat if whole else flat[start:stop]

        grad = cut(self._told(expected, name))
        if self._differs(grad, part.grad):
            at = findings.owned("equality.grad", "", step, rank, place)
            yield findings.differing(at, grad, part.grad)
        want = expected.state[name]
        state = {key: cut(value) if value.dim() else value for key, value in want.items()}
        yield from self._compare_update(rank, step, part, cut(expected.masters[name]), state)

    def _compare_update(
        self, rank: int, step: int, part: OwnedPart, master: Tensor, want: Mapping[str, Tensor]
    ) -> Iterator[Finding]:
        """Compare what the optimizer made of a part, with a master and state cut to it."""
        place = part.place
        compared = [("equality.master", "", master, part.master)]
        compared += [
            ("equality.state", key, want[key], part.state[key])
            for key in sorted(want.keys() & part.state.keys())
        ]
        for check, key, value, got in compared:
            if self._differs(value, got):
                yield findings.differing(findings.owned(check, key, step, rank, place), value, got)
        for key in sorted(want.keys() ^ part.state.keys()):
            at = findings.owned("equality.state", key, step, rank, place)
            side = "the reference" if key in part.state else "the system"
            yield replace(at, message=f"optimizer state {key!r} is missing in {side}")

    def _differs(self, expected: Tensor, got: Tensor) -> bool:
        self.compared_elems += expected.numel()
        if expected.dtype != got.dtype or expected.numel() != got.numel():
            return True
        return not same_bits(expected, got)


def _scales_of(engine: AskedEngine, *, names: Collection[str]) -> dict[str, Tensor | None]:
    """Scales of params in fp8 as a rank has them: buffers of the module, as the workload says."""
    buffers = engine.module_buffers() if names else {}
    return {name: buffers.get(name + SCALE_SUFFIX) for name in names}


def _frozen(step: ReferenceStep) -> ReferenceStep:
    """A copy that survives the reference's next step; needed only where one rank runs ahead."""

    def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in tensors.items()}

    return replace(
        step,
        grads=copied(step.grads),
        masters=copied(step.masters),
        params=copied(step.params),
        scales=copied(step.scales),
        state={name: copied(state) for name, state in step.state.items()},
    )
