"""Rules that findings propose, and a target with rules under trial."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zero_sim.findings.records import CaseResult
from zero_sim.targets import Numerics, Target

# These patterns match words in findings; see `rules.explainer` and `judge.rules_tried`.
_DECLARE = re.compile(r"(?:declare|of:|,) Numerics\((.*?)\)(?=,|$)", flags=re.MULTILINE)
_FITTING = re.compile(r"these are the bits of (?!the step)(.*?)(?:; a case .*)?\.$", re.MULTILINE)
_ADVICE = re.compile(
    r"^(If [a-z ]+ intended, declare (?:one of: )?Numerics\(.*\)|No rule is proposed: .*)$\n?",
    re.MULTILINE,
)
_DTYPE_FIELDS = ("accumulate_dtype", "reduce_dtype")


class WithNumerics:
    """A target with unlimited capabilities, judged by rules under trial.

    Everything else is passed on to the target itself.
    """

    # None, because the search itself determines the capabilities.
    capabilities = None

    def __init__(self, target: Target, numerics: Numerics) -> None:
        self._target = target
        self.name = target.name
        self.numerics = numerics

    # Python calls this only for attributes that are not set here.
    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def build(self, module: Any, **named: Any) -> Any:
        """Build the target's engine."""
        return self._target.build(module, **named)


def declared_by(result: CaseResult) -> list[dict[str, Any]]:
    """Return the declarations that the first finding proposes, most likely first."""
    declared: list[dict[str, Any]] = []
    # Later findings may follow from the first finding.
    for finding in result.findings[:1]:
        declared.extend(map(_parsed, _DECLARE.findall(finding.detail)))
        for text in _FITTING.findall(finding.detail):
            # "divide = 'pre' or 'premul'" names the field once.
            lead = text.partition(" = ")[0]
            declared.extend(
                _parsed(each if " = " in each else f"{lead} = {each}")
                for each in text.split(" or ")
            )
    # Without duplicates, in order.
    return [each for index, each in enumerate(declared) if each not in declared[:index]]


def without_advice(result: CaseResult) -> CaseResult:
    """Return the result without proposals, because a single case is too little evidence."""
    kept = (
        replace(finding, detail=_ADVICE.sub("", finding.detail).rstrip())
        for finding in result.findings
    )
    return replace(result, findings=tuple(kept))


def _parsed(text: str) -> dict[str, Any]:
    # literal_eval, because a proposal only contains constants.
    call = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}


def with_change(declared: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return a declaration with changes, and without the fields that these replace."""
    kept = dict(declared)
    # A common dtype replaces separate dtypes.
    if "grad_dtype" in change:
        kept = {name: v for name, v in kept.items() if name not in _DTYPE_FIELDS}
    # `divide_each` belongs to a choice for `sync`, and `predivide_by` to a choice for `divide`.
    if "sync" in change:
        kept.pop("divide_each", None)
    if "divide" in change:
        kept.pop("predivide_by", None)
    return kept | dict(change)


def in_words(values: Mapping[str, Any], *, empty: str = "the same") -> str:
    """Return a declaration's fields as source code; `empty` if there are none."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items()) or empty
