"""Guards against empty passes: why equality would mean little, though nothing is wrong.

Each cell and each segment is held to them by itself: what one of them shows says nothing about
another, so the worst counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from zero_sim.findings.records import Finding
from zero_sim.judge.guarantee import Guarantee
from zero_sim.judge.judge_report import JudgeReport
from zero_sim.scenario.checks import Check
from zero_sim.scenario.spec import Scenario
from zero_sim.sim import FaultRecord
from zero_sim.workloads import EXACT_MODELS


def check_meaning(scenario: Scenario, judges: Sequence[JudgeReport]) -> Iterator[Finding]:
    """Give the first judge's doubt of each kind, the one with the fewest gradients for those."""
    if scenario.data.ranks == "distinct":
        for judge in [judge for judge in judges if judge.same_data][:1]:
            yield Finding(
                check=Check.GUARD_SAME_DATA,
                message=f"all ranks saw the same data in every step{_where(judge, judges)}, which "
                "hides most bugs of a reduction; feed distinct data, or say "
                'data.ranks = "same" if that is the point',
            )
    least = min(judges, key=lambda judge: judge.nonzero_fraction_max)
    is_low = least.nonzero_fraction_max < scenario.expect.nonzero_min
    if is_low and not scenario.world.order_known:
        yield Finding(
            check=Check.GUARD_WIDE_BOUNDS,
            message=f"at most {least.nonzero_fraction_max:.0%} of the gradient elements owe "
            f"anything but zero in any step{_where(least, judges)}, expected at least "
            f"{scenario.expect.nonzero_min:.0%}: what lies within bounds that wide proves nothing",
        )
    elif is_low:
        yield Finding(
            check=Check.GUARD_ZERO_GRADIENTS,
            message=f"at most {least.nonzero_fraction_max:.0%} of the gradient elements were "
            f"nonzero in any step{_where(least, judges)}, expected at least "
            f"{scenario.expect.nonzero_min:.0%}: equal zeros prove nothing",
        )
    for judge in [judge for judge in judges if not judge.has_stepped][:1]:
        yield Finding(
            check=Check.GUARD_NOTHING_STEPPED,
            message="every step was skipped or had gradients that are not finite"
            f"{_where(judge, judges)}, so that no update was compared; take more steps, or plant "
            "the overflow in one of several",
        )
    owed = sum((judge.owed for judge in judges), start=Counter[Guarantee]())
    depending = owed.total() - owed["order-free"]
    if scenario.model.name in EXACT_MODELS and depending:
        yield Finding(
            check=Check.GUARD_NOT_ORDER_FREE,
            message=f"{depending} of {owed.total()} elements of reduced gradients depend on the "
            "order of addition, though this model is there to have none: fewer ranks, rows or "
            "micro-batches, or a division after the sum, keep it within its budget",
        )
    for judge in judges:
        if judge.unfollowed:
            yield Finding(
                check=Check.GUARD_NOT_FOLLOWED,
                step=judge.uncertified_step,
                message=judge.unfollowed,
            )
        elif judge.uncertified_step is not None:
            yield Finding(
                check=Check.GUARD_NORM_NOT_CERTIFIED,
                step=judge.uncertified_step,
                message="the norm lies so close to the middle of two fp32 values that its rounding "
                "depends on the order of the sum; nothing clipped by it is owed. Try another seed",
            )


def check_faults(records: Iterable[FaultRecord]) -> Iterator[Finding]:
    """Give a doubt for each planned fault of a case in which nothing was found.

    A rank that is slow owes nothing but agreement, so that one which was says nothing here.
    """
    for record in records:
        if not record.fired:
            yield Finding(
                check=Check.GUARD_FAULT_NOT_REACHED,
                rank=record.rank,
                message=f"the planned fault never happened: {record}",
            )
        elif record.kind != "slow":
            yield Finding(
                check=Check.GUARD_FAULT_UNNOTICED,
                rank=record.rank,
                message="a planned fault happened and everything agreed bit for bit all the same: "
                f"{record}",
            )


def _where(judge: JudgeReport, judges: Sequence[JudgeReport]) -> str:
    """Which cell and segment a judge saw, where there are several."""
    if len(judges) == 1:
        return ""
    ranks = ", ".join(map(str, judge.world_ranks))
    return f" from step {judge.first_step} on ranks {ranks}"
