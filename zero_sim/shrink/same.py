"""What makes the findings of two cases one, so that what is shrunk does not become another bug."""

from __future__ import annotations

from zero_sim.verify.records import CaseResult

Key = tuple[str, str, str]
"""What makes two findings one: the check, the phase of the step, the kind of param."""


def key_of(result: CaseResult) -> Key | None:
    """What a result found, as far as it tells findings apart; None where nothing is wrong.

    The message does not count, nor where it is: step, rank, offset, values and the param's name
    differ from case to case.
    """
    if result.verdict in ("pass", "inconclusive"):
        return None
    if not result.findings:
        return "internal.refused", "", ""
    first = result.findings[0]
    return first.check, first.phase or "", _kind(first.param)


def may_shrink(key: Key) -> bool:
    """Whether smaller cases can have the same finding for the same reason.

    What a case expects beyond equality, such as a degree of overlap, it expects at its own size:
    smaller ones would miss it for being smaller.
    """
    return not key[0].startswith("expect.")


def _kind(param: str | None) -> str:
    if param is None:
        return ""
    return "expert" if "experts" in param.split(".") else "dense"
