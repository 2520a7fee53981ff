"""Access to the first finding, and targets that report wrong values."""

from __future__ import annotations

from functools import partial

from zero_sim.targets.own import ZeroSimTarget


def first_finding(result, check):
    """Return the first finding of a failed case; assert its check."""
    assert result.verdict == "fail", result
    assert result.findings[0].check == check, result.findings
    return result.findings[0]


class WrongAnswers:
    """zero_sim's own system with some methods replaced.

    Args:
        answers: Replacements by method name; each takes the engine and the original method.
    """

    name = "zero_sim"
    capabilities = None

    def __init__(self, **answers):
        self._answers = answers

    def build(self, module, *, scenario, group):
        engine = ZeroSimTarget().build(module, scenario=scenario, group=group)
        for name, answer in self._answers.items():
            setattr(engine, name, partial(answer, engine, getattr(engine, name)))
        return engine
