"""What a first finding is asked, and engines that tell wrong what they did right."""

from __future__ import annotations

from functools import partial

from zero_sim.targets.own import ZeroSimTarget


def first_finding(result, check):
    """The first finding of a case that fails; its check must be this one."""
    assert result.verdict == "fail", result
    assert result.findings[0].check == check, result.findings
    return result.findings[0]


class WrongAnswers:
    """The project's own system, whose engine answers some questions otherwise.

    Args:
        answers: By name of a method: called with the engine and the method as it was.
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
