"""Rules that findings say would fit, and a target that is judged by rules that are tried."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zero_sim.findings.records import CaseResult
from zero_sim.targets import Numerics, Target

_DECLARE = re.compile(r"(?:declare|of:|,) Numerics\((.*?)\)(?=,|$)", flags=re.MULTILINE)
_FITTING = re.compile(r"these are the bits of (?!the step)(.*?)(?:; a case .*)?\.$", re.MULTILINE)
_ADVICE = re.compile(
    r"^(If [a-z ]+ intended, declare (?:one of: )?Numerics\(.*\)|No rule is proposed: .*)$\n?",
    re.MULTILINE,
)
_DTYPE_FIELDS = ("accumulate_dtype", "reduce_dtype")


class Asked:
    """A target that may be asked for everything, and is judged by the rules that are tried.

    Args:
        target: What is behind it; all else is as it has it.
        numerics: The rules.
    """

    capabilities = None

    def __init__(self, target: Target, numerics: Numerics) -> None:
        self._target = target
        self.name = target.name
        self.numerics = numerics

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def build(self, module: Any, **named: Any) -> Any:
        """As the target does."""
        return self._target.build(module, **named)


def declared_by(result: CaseResult) -> list[dict[str, Any]]:
    """What the first finding of a result says could be declared, the likeliest first.

    Args:
        result: Of a case; none of one without findings.
    """
    said: list[dict[str, Any]] = []
    for finding in result.findings[:1]:
        said.extend(map(_parsed, _DECLARE.findall(finding.detail)))
        for text in _FITTING.findall(finding.detail):
            lead = text.partition(" = ")[0]
            said.extend(
                _parsed(each if " = " in each else f"{lead} = {each}")
                for each in text.split(" or ")
            )
    return [each for index, each in enumerate(said) if each not in said[:index]]


def without_advice(result: CaseResult) -> CaseResult:
    """Return the result without proposals of its findings, which one case alone suggests.

    Args:
        result: Of a case.
    """
    kept = (
        replace(finding, detail=_ADVICE.sub("", finding.detail).rstrip())
        for finding in result.findings
    )
    return replace(result, findings=tuple(kept))


def _parsed(text: str) -> dict[str, Any]:
    call = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}


def with_change(said: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """A declaration with some of it replaced, without what that stands in the place of.

    Args:
        said: Fields of `Numerics`.
        change: Those that are others.
    """
    kept = dict(said)
    if "grad_dtype" in change:
        kept = {name: v for name, v in kept.items() if name not in _DTYPE_FIELDS}
    if "sync" in change:
        kept.pop("divide_each", None)
    if "divide" in change:
        kept.pop("predivide_by", None)
    return kept | dict(change)


def in_words(values: Mapping[str, Any], *, empty: str = "the same") -> str:
    """Fields of a declaration as they are written.

    Args:
        values: By name of the field.
        empty: What is said of none.
    """
    return ", ".join(f"{name}={value!r}" for name, value in values.items()) or empty
