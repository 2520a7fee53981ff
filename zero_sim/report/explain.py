"""Explanations of checks: why sharded training needs each, what breaks it, where it was seen.

The bugs named are public ones in other projects: the nearest known relatives of a finding, not its
cause.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from zero_sim.errors import UsageError
from zero_sim.scenario.checks import Check


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """One check, explained."""

    check: Check
    meaning: str
    """What was compared, or what must hold."""
    why: str
    """What goes wrong in training where it does not hold."""
    causes: tuple[str, ...]
    """What usually breaks it, the most frequent first."""
    seen_in: tuple[str, ...] = ()
    """Public bugs of this kind, `project#number: what it was`."""

    def as_dict(self) -> dict[str, object]:
        """Everything, ready for JSON."""
        return dataclasses.asdict(self)


_EXPLANATIONS = (
    Explanation(
        check=Check.EQUALITY_LOAD,
        meaning="Right after a checkpoint was loaded, before the next forward, each rank has the "
        "masters, optimizer state, working params, scales, settings of param groups and loss scale "
        "that the run was saved with, bit for bit, whatever the new layout is.",
        why="A run that goes on with a wrong moment or counter trains on without an error; the "
        "loss shows it steps later, if at all, and names no param.",
        causes=(
            "a piece of a param was read at the offset of another layout, or of another rank",
            "masters were made anew of the low-precision params and lost their lower bits",
            "working params were not gathered again after the masters were loaded",
            "a key of the state, a step counter or the loss scale was forgotten, or two swapped",
            "param groups got each other's settings",
        ),
        seen_in=(
            "Megatron-LM#5077: padding was stripped, and later offsets still counted it",
            "PyTorch/XLA#6857: masters were built from 16-bit params",
            "DeepSpeed#4702: moments changed places",
            "NeMo-RL#949: working params lagged behind the masters",
        ),
    ),
    Explanation(
        check=Check.EQUALITY_LOSS,
        meaning="The loss of one micro-batch on one rank equals the reference's, bit for bit.",
        why="It is the first number that depends on the params: a difference means that this "
        "forward did not use the params that the step before should have left.",
        causes=(
            "a module reads its params before the gather of the step before was waited for",
            "the gather left out params, or brought them in another order",
            "a low-precision copy of a param was not refreshed after the step",
            "a skipped step left params marked as gathered that never were",
            "in the first step: ranks began with different params or buffers, which nobody spread",
        ),
        seen_in=(
            "Megatron-LM#663: stale params with overlapped gathers",
            "Megatron-LM#6388: a tied param was read outside of its module's turn",
            "Megatron-LM#6336: the low-precision copy of a split param was not refreshed",
        ),
    ),
    Explanation(
        check=Check.EQUALITY_GRAD,
        meaning="The gradient of each owned element, as summed over ranks and micro-batches, is "
        "the reference's sum in the named order; where no order is known, it lies within the "
        "bound that is proven from all ranks' gradients.",
        why="Everything after it, norm, moments and params, is made of it; optimizers such as Adam "
        "hide a wrong factor from the params completely.",
        causes=(
            "a bucket was not reduced, or reduced before its last gradient was there",
            "a micro-batch was dropped, counted twice, or copied instead of added",
            "a rank's contribution is missing, or comes from a buffer that was refilled in flight",
            "the sum ran over the wrong group, or only inside one replica",
            "the divisor is off, or was applied twice",
            "the gradient of a tied, unused or frozen param shifted its neighbours",
        ),
        seen_in=(
            "DeepSpeed#545: params without gradient were left out, the rest shifted",
            "DeepSpeed#4321: a param that exactly filled a bucket was dropped",
            "PyTorch#155903: divided by the shard group instead of all ranks",
            "PyTorch#125484: only the last micro-batch went into the outer sum",
            "DeepSpeed#7967: all but the first micro-batch were lost",
        ),
    ),
    Explanation(
        check=Check.EQUALITY_NORM,
        meaning="The gradient norm that the step reports equals the "
        "reference's: every element of every param counted exactly once.",
        why="Clipping scales all gradients by it; a norm that is a little wrong changes the "
        "learning rate a little, on every step, and looks like nothing at all.",
        causes=(
            "the norm of the local shard only, or of one replica counted several times",
            "padding that holds something else than zeros",
            "tied or tensor-parallel params counted more than once",
            "the norm taken before the division, or before unscaling",
            "norms added instead of squares, or squares added in too little precision",
        ),
        seen_in=(
            "PyTorch/XLA#4796: each rank clipped by the norm of its own shard",
            "DeepSpeed#3832: padding took part in the norm",
            "torchtitan#2318: the norm off by the number of ranks",
        ),
    ),
    Explanation(
        check=Check.EQUALITY_ZEROS,
        meaning="The number of zero elements in the whole gradient that the step reports equals "
        "the reference's: every element of every param counted exactly once.",
        why="It is a cheap witness of what was reduced: a count that is off tells of padding, of a "
        "shard or of a param that was counted twice or not at all.",
        causes=(
            "padding, which is all zeros, was counted",
            "the count of the local shard only, or of one replica several times",
            "counted before the reduction, or after clipping by value",
        ),
        seen_in=("DeepSpeed#3832: padding took part in what was summed over the gradient",),
    ),
    Explanation(
        check=Check.EQUALITY_SKIPPED,
        meaning="The step was skipped exactly where some rank's scaled gradient overflowed.",
        why="If some ranks skip a step and others take it, their params part for ever.",
        causes=(
            "the overflow flag was not reduced over all ranks, or read before it was",
            "only the owned shard was looked at, and nobody else was told",
        ),
        seen_in=("PyTorch#115710: found_inf was used before its reduction had completed",),
    ),
    Explanation(
        check=Check.EQUALITY_LOSS_SCALE,
        meaning="The loss scale used in the step equals the reference's.",
        why="A scale that differs between ranks weights their gradients differently, silently.",
        causes=("the scale's counters were advanced on some ranks only, or not restored on load",),
    ),
    Explanation(
        check=Check.EQUALITY_MASTER,
        meaning="The fp32 master of each owned element equals the reference's after the step.",
        why="Masters carry everything that training has learnt below the precision of the params.",
        causes=(
            "a step with another learning rate, weight decay or step count than the group's",
            "state of one fragment used for another",
            "masters re-read from the low-precision params after a load",
            "clipping left out some params, or used max for min",
        ),
        seen_in=(
            "DeepSpeed#5150: max for min in the clip coefficient",
            "PyTorch/XLA#6857: masters rebuilt from low precision at load",
            "Megatron-LM#4705: param groups matched by position at load",
        ),
    ),
    Explanation(
        check=Check.EQUALITY_STATE,
        meaning="Every tensor of the optimizer's state, moments and step counters, equals the "
        "reference's.",
        why="A wrong moment shows in the params only steps later, and then looks like noise.",
        causes=(
            "a step counter kept once per bucket or per rank instead of per param",
            "state shifted by one fragment after a load into another layout",
            "padding stripped on save while the offsets still count it",
        ),
        seen_in=(
            "PyTorch#96313: the step counter advanced once per bucket",
            "Megatron-LM#5077: states of the second bucket shifted after a reshard",
            "DeepSpeed#5342: rank files merged in the order of their names",
        ),
    ),
    Explanation(
        check=Check.EQUALITY_PARAMS,
        meaning="Every rank's working params equal the cast of the reference's masters, all of "
        "them, owned or not. In phase forward: so do the params that the forward read whose loss "
        "differs.",
        why="Ranks that train on different params still produce a falling loss.",
        causes=(
            "a gather that left out a bucket, used another dtype or was not waited for",
            "the write-back of a fragment went to the wrong place",
            "the gather was issued before the owner had written its part",
            "the engine registered a tied param twice and updated one of the two",
            "weight decay, a cast or a load took hold of a param that is never trained",
        ),
        seen_in=(
            "DeepSpeed#8073: a coalesced gather used the first param's dtype",
            "Megatron-LM#4609: the gather's target was a gradient buffer still in use",
        ),
    ),
    Explanation(
        check=Check.EQUALITY_SCALE,
        meaning="The scale of each fp8 param equals the reference's, on every rank.",
        why="A param's bytes mean nothing without the scale they were made with.",
        causes=(
            "the largest magnitude was taken over the local shard only",
            "a scale of the step before was kept on some ranks",
        ),
    ),
    Explanation(
        check=Check.INVARIANT_OWNERSHIP,
        meaning="Between them, the ranks of one replica own every element of every param exactly "
        "once.",
        why="An element without owner is never trained; one with two by chance.",
        causes=(
            "an off-by-one at the end of a shard",
            "a param's part measured from the param's start instead of the shard's",
            "a rank that owns nothing, or a param smaller than the number of ranks",
        ),
        seen_in=(
            "DeepSpeed#5652: a negative overlap length for small params",
            "Megatron-LM#561: the buffer padded, but not each bucket",
        ),
    ),
    Explanation(
        check=Check.INVARIANT_ZERO_GRADIENTS,
        meaning="Before the first backward of a step all gradient buffers are zero.",
        why="Gradients left over from the step before act like momentum that nobody asked for.",
        causes=("the buffer was not zeroed", "it was zeroed before a reduction had read it"),
        seen_in=("Megatron-LM#4609: the buffer was reused by a gather and not zeroed",),
    ),
    Explanation(
        check=Check.INVARIANT_PADDING,
        meaning="Padding holds zeros, in gradients, params and masters alike.",
        why="Padding ends up in norms, in checkpoints and in the shards of the next layout.",
        causes=("memory allocated without being zeroed", "an offset that runs into the padding"),
        seen_in=("DeepSpeed#8210: uninitialised padding in the norm",),
    ),
    Explanation(
        check=Check.INVARIANT_CAST,
        meaning="A working param equals its own master, cast to the working dtype.",
        why="It is the one link between what is stepped and what is trained with.",
        causes=("a fragment was not written back", "it was written to a neighbour's place"),
        seen_in=("Megatron-LM#6336: only the first part of a split param was refreshed",),
    ),
    Explanation(
        check=Check.INVARIANT_START,
        meaning="Before the first step, ranks that hold the same param or buffer have the same "
        "values of it; asked where the case has them begin with different ones "
        "(`model.distinct_start`).",
        why="Gradients are averaged, weights are not: replicas that begin apart stay apart, and "
        "what is saved or evaluated is one of them, or pieces of several.",
        causes=(
            "params are not broadcast at the start, or not all of them",
            "module buffers and frozen params are left out of the broadcast",
            "masters are taken from the params before the broadcast",
            "a broadcast over a group of which not all holders are members",
        ),
    ),
    Explanation(
        check=Check.INVARIANT_REPLICAS,
        meaning="Ranks that hold the same reduced gradient, norm or working param hold the same "
        "bits of it; asked where the order of addition is not known, and no reference can say "
        "which bits these are.",
        why="In every algorithm one rank finishes a sum and copies of it travel. Ranks that go on "
        "from different numbers train different models, and drift apart without an error.",
        causes=(
            "a gather that was left out, ran over the wrong group, or was not waited for",
            "a param that one rank alone wrote to after the gather",
            "copies of a sum that each rank adds up by itself, in its own order",
            "a norm that one rank took over another group",
        ),
    ),
    Explanation(
        check=Check.INVARIANT_OVERLAP,
        meaning="Each reduction was on its way as soon as its bucket's gradients were there, and "
        "no reduction or gather was waited for before it had to be.",
        why="A pipeline that issues late or waits early has the right numbers and costs what it "
        "was made to save; the usual cure of a race does just that. When a call is due follows "
        "from when gradients arrive and modules begin, and from which params share a bucket.",
        causes=(
            "a wait right behind the call",
            "buckets that are issued only at the end of backward",
            "one bucket that waits for a param of another, or for one that is frozen",
            "gathers that are all waited for before the first forward",
        ),
        seen_in=(
            "DeepSpeed#7371: a fix for a race that serialised the pipeline",
            "DeepSpeed#1219: another one",
        ),
    ),
    Explanation(
        check=Check.INVARIANT_VOLUME,
        meaning="In every step, each rank calls exactly the collectives that its stage needs: "
        "their kinds, groups and elements follow from the sizes of the params in closed form.",
        why="Twice the traffic gives the same numbers, and costs half of the speed.",
        causes=(
            "an all-reduce and a slice where a reduce-scatter was meant",
            "frozen params, or a stale tail of a bucket, that are reduced all the same",
            "a gather or a reduction that runs once more than it has to, or once a micro-batch",
            "buckets that are closed too early, so that there are too many of them",
        ),
        seen_in=(
            "DeepSpeed#4946: gradients all-reduced instead of reduce-scattered",
            "DeepSpeed#5268: the whole preallocated bucket was reduced, stale tail included",
        ),
    ),
    Explanation(
        check=Check.INVARIANT_MEMORY,
        meaning="Between two steps a rank holds the bytes that its stage allows: flat gradients "
        "and params, masters and state of what it owns; nothing else grows with the model. Within "
        "a step, where a phase is named, whole gradients and params are those alone of buckets "
        "that fill, are in flight, in use, gathered ahead or kept for backward.",
        why="Memory is what sharding is for; a copy that is kept gives it away silently.",
        causes=(
            "fp32 copies of the gradients that outlive the step",
            "masters or state of what other ranks own",
            "frozen params that have a place in the buffers",
            "reductions that nobody waits for, so that more than one bucket is in flight",
            "params that are gathered too early or freed too late",
        ),
        seen_in=(
            "DeepSpeed#2665: full gradients kept after the reduce-scatter",
            "DeepSpeed#8029: state for frozen params",
        ),
    ),
    Explanation(
        check=Check.INVARIANT_CROSSING,
        meaning="No collective of the system joins ranks that train different params.",
        why="Sums over different params are sums of unrelated numbers.",
        causes=("a group made from world ranks instead of group ranks", "a default group used"),
        seen_in=("DeepSpeed#7601: a slice taken by global instead of group rank",),
    ),
    Explanation(
        check=Check.INVARIANT_ONE_DEVICE,
        meaning="Ranks that all see the same data have, together, the gradient of one device. "
        "Looked at only where a case says so (expect.one_device).",
        why="It is what many a toy is tested by, and it does not hold in general: N x (g / N) is g "
        "only where no partial sum is rounded, as with 2 and 4 ranks. With 3, 5, 6 or 7, or with 8 "
        "one after another, it fails in a correct system.",
        causes=(
            "a number of ranks that is no power of two: division and sum are rounded",
            "8 ranks or more, added one after another: 3g, 5g and 7g are rounded",
            "a division that is left out, or done twice",
        ),
        seen_in=(),
    ),
    Explanation(
        check=Check.INVARIANT_GIVEN_BACK,
        meaning="A module that an engine gives back after the last step is as it was before, but "
        "for the values of its params: no hook more or less, the same classes and attributes, "
        "no gradients, each param the same object in memory of its own, with the values that it "
        "had in the engine. Looked at only where an engine has `unwrap`.",
        why="A hook that stays behind goes on moving gradients of whoever uses the module next; a "
        "param that is a view of a flat buffer keeps all of it alive and is written with it.",
        causes=(
            "a hook whose handle was not kept, or kept and not removed",
            "params that still are views of a flat buffer, or placeholders of sharded ones",
            "masters on another device whose last step was not copied back",
            "attributes such as main_grad that stay on params",
        ),
        seen_in=(),
    ),
    Explanation(
        check=Check.WORLD_CONTRACT,
        meaning="Every rank of a group issued the same collectives, in one order, with tensors "
        "that fit and that NCCL accepts.",
        why="NCCL does not check: it hangs, or takes one rank's bytes for another's.",
        causes=(
            "a bucket order that follows which gradient arrived first, which differs by rank",
            "a rank that skips a collective because it owns or uses nothing",
            "a branch on a value that only one rank has",
        ),
        seen_in=(
            "DeepSpeed#2343: ranks ordered their gradients differently",
            "PyTorch#158719: a rank skipped the bucket of a param that it did not use",
        ),
    ),
    Explanation(
        check=Check.WORLD_DEADLOCK,
        meaning="No rank could go on: each waits for a collective that another never comes to.",
        why="On a cluster it costs the time-out, and then tells nothing.",
        causes=(
            "a rank returned or raised early",
            "a collective inside a branch that not all take",
            "two groups used in different order on two ranks",
        ),
        seen_in=("PyTorch#158719: a param unused on one rank",),
    ),
    Explanation(
        check=Check.WORLD_RACE,
        meaning="The program touched memory that a collective was still reading or writing.",
        why="On a device the result depends on timing: mostly right, sometimes not.",
        causes=(
            "a missing wait, or a wait on another handle",
            "a gradient buffer refilled or zeroed while its reduction still reads it",
            "a param read outside the order in which gathers are waited for",
        ),
        seen_in=(
            "PyTorch#144535: the reduced gradient was read without a wait",
            "DeepSpeed#5545: a data race of overlapped reductions",
        ),
    ),
    Explanation(
        check=Check.WORLD_IN_FLIGHT_RACE,
        meaning="The program touched memory that it had lent to a collective, between its issue "
        "and its wait.",
        why="Until then the collective may read its inputs and write its outputs at any time: "
        "what it carries then depends on timing, and no run shows it for certain.",
        causes=(
            "a buffer zeroed, refilled or freed right after an asynchronous call",
            "an output read, or lent to a second collective, before the wait",
            "the handle dropped, so that nobody ever waits",
        ),
        seen_in=(
            "DeepSpeed#5545: a data race of overlapped reductions",
            "Megatron-LM#4609: the gather's target was a gradient buffer still in use",
        ),
    ),
    Explanation(
        check=Check.WORLD_STALLED_BY_PLAN,
        meaning="The ranks wait for one that the scenario's plan of faults stalled.",
        why="A stalled rank stops all others: that the world says so at once, and whom it waits "
        "for, is what such a case is to show.",
        causes=("faults in the scenario; where it is meant, say expect.finding",),
    ),
    Explanation(
        check=Check.WORLD_RANK_FAILED,
        meaning="A rank raised an exception.",
        why="The others would have waited for it until a time-out.",
        causes=("see its traceback",),
    ),
    Explanation(
        check=Check.WORLD_STALLED,
        meaning="A rank ran on without ever reaching a collective that others wait for.",
        why="Training stands still.",
        causes=("an endless loop", "a computation longer than the limit; raise stall_seconds"),
    ),
    Explanation(
        check=Check.WORLD_FAILED,
        meaning="The world ended for a reason that has no check of its own.",
        why="Nothing after it was judged.",
        causes=("see its text",),
    ),
    Explanation(
        check=Check.WORLD_RANK_DIED,
        meaning="Every worker process lived to the end of its case.",
        why="A rank that is gone takes the whole job with it.",
        causes=(
            "the system ended the process, or ran out of memory",
            "a native library crashed; the signal is in the message",
        ),
    ),
    Explanation(
        check=Check.WORLD_HUNG,
        meaning="Every process gave a sign of life within `run.stall_seconds`.",
        why="A job that hangs costs every machine it runs on until somebody looks.",
        causes=(
            "ranks issued different collectives, or the same in another order",
            "one rank waits for something that only it knows of; see where each rank was",
            "a limit that is too short for the model",
        ),
    ),
    Explanation(
        check=Check.BACKEND_ORDER_DRIFT,
        meaning="The backend adds in the order, and with the accumulator, of the model that the "
        "case names; measured from its outputs before the first case relies on it.",
        why="Where it does not, the bits of an ordinary gradient are not known, and a difference "
        "would be no bug of the system under test. A case is then judged by proven bounds, with a "
        "note; this finding is for one that cannot be: with a reload, experts, fp8 params, tp "
        "or pp.",
        causes=(
            "another version of the library, or a setting that changes its algorithm",
            "a topology in which the ring runs through the ranks in another order",
        ),
    ),
    Explanation(
        check=Check.EXPECT_ACCURACY,
        meaning="The held-out accuracy after the last step reached what the scenario expects.",
        why="Equality with the reference says that both train alike, not that they learn.",
        causes=("a learning rate or a number of steps that does not fit",),
    ),
    Explanation(
        check=Check.EXPECT_FINDING,
        meaning="The scenario plants something wrong and names the check that must find it.",
        why="A check that cannot fail protects nobody.",
        causes=("the fault did not take effect", "another check found it first"),
    ),
    Explanation(
        check=Check.GUARD_SAME_DATA,
        meaning="The ranks saw different data.",
        why="With equal data on all ranks most bugs of a reduction cannot be seen: mixed-up ranks, "
        "contributions that are missing or counted twice.",
        causes=('data.ranks = "same"', "a seed that does not depend on the rank"),
    ),
    Explanation(
        check=Check.GUARD_ZERO_GRADIENTS,
        meaning="Enough of the gradient is nonzero.",
        why="Equal zeros prove nothing.",
        causes=("saturated activations", "params that the loss does not reach"),
    ),
    Explanation(
        check=Check.GUARD_WIDE_BOUNDS,
        meaning="Where the order of addition is not known, enough elements of the gradient have a "
        "bound that does not hold zero.",
        why="A bound that holds zero is kept by a system that sums nothing: to lie within it "
        "proves nothing.",
        causes=(
            "many ranks that add in bf16: the bound grows with each addition",
            "contributions that cancel, as with the same data of opposite sign",
        ),
    ),
    Explanation(
        check=Check.GUARD_NOT_FOLLOWED,
        meaning="Where the order of addition is not known, each step can be followed: from the "
        "gradient that the system shows to its masters, and on from its params.",
        why="What comes after a step that cannot be followed is not owed, so that agreement up to "
        "there is all that is known.",
        causes=(
            "a target that does not tell its parts, or tells gradients after a division",
            "gradients so large that some order of addition overflows",
        ),
    ),
    Explanation(
        check=Check.GUARD_NOTHING_STEPPED,
        meaning="At least one step was taken, on finite gradients.",
        why="A run whose every step was skipped compares initial values with themselves.",
        causes=("an overflow in every step",),
    ),
    Explanation(
        check=Check.GUARD_NOT_ORDER_FREE,
        meaning="With a model that is there to have exact sums, no sum depends on the order of "
        "addition.",
        why="Where one does, equality is owed only under the modelled order, and a real backend "
        "may rightly differ.",
        causes=(
            "more ranks, rows or micro-batches than the exact numbers leave room for",
            "a division before the sum, which rounds",
        ),
    ),
    Explanation(
        check=Check.GUARD_NORM_NOT_CERTIFIED,
        meaning="The rounding of the norm does not depend on the order of its sum.",
        why="Where it does, no bit behind the clipping is owed, and a difference would be no bug.",
        causes=("chance: the norm lies next to the middle of two fp32 values; take another seed",),
    ),
    Explanation(
        check=Check.GUARD_FAULT_UNNOTICED,
        meaning="A planted fault took effect, and yet all state agreed.",
        why="Such a run must not count as a pass: it shows a fault that nothing noticed.",
        causes=("the corrupted element does not reach any state", "a bit that rounding removes"),
    ),
    Explanation(
        check=Check.GUARD_FAULT_NOT_REACHED,
        meaning="A planted fault took effect.",
        why="A run that never came to it says nothing about it.",
        causes=("a call number beyond the last call of that rank",),
    ),
    Explanation(
        check=Check.INTERNAL_JUDGE,
        meaning="The judge, the reference or the workload raised an error that it did not foresee.",
        why="Nothing is said about the system; please report it.",
        causes=("a bug in zero_sim", "a workload of your own that raises"),
    ),
    Explanation(
        check=Check.INTERNAL_ERROR,
        meaning="zero_sim itself failed.",
        why="Nothing was judged; please report it.",
        causes=("a bug in zero_sim",),
    ),
    Explanation(
        check=Check.INTERNAL_PROCESS_DIED,
        meaning="The process of `zero-sim run --jobs` that ran the case ended in the middle of it.",
        why="Nothing was judged; other cases go on on a new process.",
        causes=("too little memory", "a system that ends its process", "a crash inside torch"),
    ),
)

EXPLANATIONS: dict[str, Explanation] = {
    explanation.check: explanation for explanation in _EXPLANATIONS
}


def explain(check: str) -> Explanation:
    """Explain a check.

    Args:
        check: Its id, such as `equality.grad`.

    Raises:
        UsageError: There is no such check; names those there are.
    """
    try:
        return EXPLANATIONS[check]
    except KeyError:
        known = ", ".join(sorted(EXPLANATIONS))
        raise UsageError(f"expected a check, one of {known}; got {check!r}") from None
