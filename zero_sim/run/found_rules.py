"""Rules that a system follows, found by running directed cases and reading what would fit.

A case that differs names the rule whose bits these are; with that declared it runs again, until it
passes or no known rule fits. What passes under several rules alike cannot be told apart, and is
said to be so.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, get_args

from zero_sim.backends import WorldPool
from zero_sim.errors import EnvironmentProblem, UsageError
from zero_sim.findings.records import CaseResult
from zero_sim.reference import CLIP_FORMS, DIVIDE_RULES, NORMS
from zero_sim.run.rule_cases import (
    BASE,
    FOLLOWED,
    Vary,
    changed,
    clip_cases,
    overflow_case,
    rule_cases,
    unused_cases,
    with_model,
)
from zero_sim.run.runner import run_case
from zero_sim.scenario.checks import Check
from zero_sim.scenario.spec import DtypeName, ModelName, OptimizerName, OrderName, Scenario
from zero_sim.targets import Capabilities, Numerics, Target, capabilities_of, numerics_of
from zero_sim.targets.declared import followed, refusals

_DEPTH = 8
"""Most rules that are changed one after the other."""
_TRIED_MAX = 80
"""Most declarations that are tried on some cases."""
_DECLARE = re.compile(r"declare Numerics\((.*?)\)(?:,|$)", flags=re.MULTILINE)
_FITTING = re.compile(r"these are the bits of (.*?): declare")
_GUESSES: Sequence[Mapping[str, Any]] = (
    {"grads_told": "after-division"},
    {"told_dtype": "fp32"},
    {"grads_told": "after-division", "told_dtype": "fp32"},
    {"grads_told": "after-clip"},
    {"told_dtype": "param"},
    {"grads_told": "after-division", "told_dtype": "param"},
)
"""Ways of telling a gradient, tried where nothing else is known."""
_ALIKE_CASES = 8
"""Most cases that rules have to pass alike to be called the same here."""
_OF_DTYPES = ("grad_dtype", "accumulate_dtype", "reduce_dtype", "told_dtype")
_DTYPE_FIELDS = ("accumulate_dtype", "reduce_dtype")
_RULED = ("system.divide", "system.divide_by", "system.sync", "system.grad_dtype")
"""Options that a rule stands in the place of."""
_ALTERNATIVES: Mapping[str, Sequence[object]] = {
    "divide": (*DIVIDE_RULES, "avg"),
    "divide_by": ("ranks", "micro-batches", "tokens"),
    "sync": ("last", "every"),
    "divide_each": ("step", "round"),
    "grad_dtype": ("param", "fp32"),
    "accumulate_dtype": (None, "param", "fp32"),
    "reduce_dtype": (None, "param", "fp32"),
    "unused": ("zeros", "left-alone"),
    "grads_told": ("before-division", "after-division", "after-clip"),
    "told_dtype": ("sum", "param", "fp32"),
    "norm": tuple(norm for norm in NORMS if norm != "told"),
    "clip": CLIP_FORMS,
}


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


@dataclass(kw_only=True, slots=True)
class FoundRules:
    """What was found of a target."""

    target: str
    numerics: dict[str, Any] = field(default_factory=dict)
    """Fields of `Numerics` that are not as by default."""
    capabilities: dict[str, Any] = field(default_factory=dict)
    """Fields of `Capabilities` that are not as by default."""
    unclear: list[str] = field(default_factory=list)
    """What could not be told, and why."""
    left_out: dict[str, str] = field(default_factory=dict)
    """What it cannot be asked for, and what came of asking."""
    contradicted: list[str] = field(default_factory=list)
    """What it declares otherwise."""
    cases: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "target": self.target,
            "numerics": dict(self.numerics),
            "capabilities": dict(self.capabilities),
            "unclear": list(self.unclear),
            "left_out": dict(self.left_out),
            "contradicted": list(self.contradicted),
            "cases": self.cases,
        }


def find_rules(target: Target) -> FoundRules:
    """Work out which rules a target follows and what it can be asked for.

    Args:
        target: Any; its declarations are read only where nothing that is compared tells.

    Raises:
        UsageError: No plain case passes, by whatever known rule.
    """
    with WorldPool() as pool:
        return _Search(target=target, pool=pool).run()


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


@dataclass(slots=True)
class _Search:
    target: Target
    pool: WorldPool
    found: FoundRules = field(init=False)
    passed: list[Scenario] = field(default_factory=list)
    """Cases that rules decide."""
    base: Scenario = BASE
    why: str = ""
    """What came first of the cases that are being settled."""

    def __post_init__(self) -> None:
        self.found = FoundRules(target=self.target.name)

    def run(self) -> FoundRules:
        self._find_base()
        dtypes = [dtype for dtype in get_args(DtypeName) if self._settle_dtype(dtype)]
        self._settle_clip()
        self._settle_overflow()
        # Of rules that pass alike the declared one: in a case that follows they may differ.
        self._name_alternatives()
        able = self._able(dtypes)
        self._compare(able)
        return self.found

    def judge(self, case: Scenario, said: Mapping[str, Any] | None = None) -> CaseResult | str:
        """The result of a case by some rules; in words why there is none."""
        self.found.cases += 1
        try:
            numerics = Numerics(**(self.found.numerics if said is None else said))
            result = run_case(case, pool=self.pool, target=Asked(self.target, numerics))
        except (UsageError, EnvironmentProblem) as error:
            # Of several problems the first.
            return " ".join(line.strip() for line in str(error).splitlines()[:2])
        if result.verdict == "error":
            return (result.error or "it could not be judged").splitlines()[0]
        return result

    def settle(self, *cases: Scenario) -> str:
        """Declare what makes cases pass; in words what is wrong where nothing does."""
        self.why = ""
        for guesses_always in (False, True):
            said = self._fitting(
                cases,
                dict(self.found.numerics),
                depth=_DEPTH,
                tried=[],
                guesses=_GUESSES,
                guesses_always=guesses_always,
            )
            if said is not None:
                self.found.numerics = said
                self.passed.extend(cases)
                return ""
        return self.why or "no rule fits all of it"

    def _fitting(
        self,
        cases: Sequence[Scenario],
        said: dict[str, Any],
        *,
        depth: int,
        tried: list[dict[str, Any]],
        guesses: Sequence[Mapping[str, Any]],
        guesses_always: bool,
    ) -> dict[str, Any] | None:
        """A declaration with which all cases pass, from one by what findings say; or None.

        Ways of telling a gradient are guessed where no finding says what would fit, or always:
        what fits one case by itself may fit it by accident.
        """
        tried.append(said)
        for case in cases:
            result = self.judge(case, said)
            if isinstance(result, str):
                self.why = self.why or result
                return None
            if result.verdict != "fail":
                continue
            first = result.findings[0]
            self.why = self.why or f"{first.check}: {first.message}"
            changes: Sequence[Mapping[str, Any]] = declared_by(result)
            if first.check in _OF_GRADS and (guesses_always or not changes):
                # Where it is told in another way and is another one, too, nothing fits by itself,
                # nor where it is not told and only what was stepped by it differs.
                changes, guesses = (*changes, *guesses), ()
            if not changes and first.check is Check.EQUALITY_NORM:
                # Whatever its form, what clips by it can be judged by what is told.
                changes = ({"norm": "told"},)
            for change in changes if depth and len(tried) < _TRIED_MAX else ():
                changed_to = with_change(said, change)
                if changed_to not in tried:
                    # What fails is tried first again.
                    order = [case, *(each for each in cases if each is not case)]
                    found = self._fitting(
                        order,
                        changed_to,
                        depth=depth - 1,
                        tried=tried,
                        guesses=guesses,
                        guesses_always=guesses_always,
                    )
                    if found is not None:
                        return found
            return None
        return said

    def passes(self, case: Scenario, what: str) -> bool:
        """Whether a case passes by the rules that were found; else notes what came."""
        return self._has_passed(self.judge(case), what)

    def _has_passed(self, result: CaseResult | str, what: str) -> bool:
        if isinstance(result, str):
            self.found.left_out[what] = result
            return False
        if result.verdict == "pass":
            return True
        first = result.findings[0] if result.findings else None
        why = f"{first.check}: {first.message}" if first else result.verdict
        self.found.left_out[what] = why
        return False

    def _find_base(self) -> None:
        """The first plain case that some rule makes pass."""
        why = ""
        declared = capabilities_of(self.target)
        others = [stage for stage in (1, 0) if stage not in declared.stages]
        # Where nothing is sharded, copies of shards show nothing.
        for stage in (*sorted(declared.stages, key=lambda stage: (stage == 0, stage)), *others):
            for size in (3, 1):
                self.base = changed(BASE, world={"size": size}, system={"stage": stage})
                why = self.settle(self.base)
                if not why and self.passed:
                    return
        raise UsageError(
            f"expected target {self.target.name!r} to pass a plain case by some known rule, got "
            f"{why or 'nothing that was compared'}. Try `zero-sim run` on one case."
        )

    def _settle_dtype(self, dtype: DtypeName) -> bool:
        """Settle the rules of a dtype; whether it can be asked for that at all."""
        ranks = 7 if self.base.world.size > 1 else 1
        before = dict(self.found.numerics)
        cases = list(rule_cases(self.base, dtype=dtype, ranks_max=ranks))
        asked = Asked(self.target, Numerics())
        # What a target refuses of itself says nothing of its rules, but where it refuses all.
        cases = [case for case in cases if not refusals(asked, case)] or cases
        why = self.settle(*cases)
        if why:
            self.found.left_out[f"model.dtype = {dtype!r}"] = why
            return False
        for unused in unused_cases(cases[0]):
            why = self.settle(unused)
            if why:
                self.found.left_out[unused.name] = why
        for case in [case for case in self.passed if case.model.dtype != dtype]:
            result = self.judge(case)
            if isinstance(result, str) or result.verdict == "fail":
                now = _said({n: v for n, v in self.found.numerics.items() if before.get(n) != v})
                self.found.unclear.append(
                    f"rules depend on the dtype: {dtype} needs {now}, with which {case.name!r} "
                    "differs; declare numerics(scenario)"
                )
                self.found.numerics = before
                break
        return True

    def _settle_clip(self) -> None:
        why = self.settle(*clip_cases(self.base))
        if why:
            self.found.left_out["optimizer.clip_norm"] = why

    def _settle_overflow(self) -> None:
        case = overflow_case(self.base)
        result = self.judge(case, {**self.found.numerics, "nonfinite": "skipped"})
        if not isinstance(result, str) and result.verdict == "pass":
            self.found.numerics["nonfinite"] = "skipped"

    def _able(self, dtypes: Sequence[str]) -> Capabilities:
        """What it can be asked for."""
        declared, base = capabilities_of(self.target), self.base
        able: dict[str, Any] = {"dtypes": tuple(dtypes)}
        if base.world.size == 1:
            able["world_size_max"] = 1
        able["optimizers"] = self._of(
            get_args(OptimizerName),
            "optimizer.name",
            lambda name: changed(base, optimizer={"name": name}, run={"steps": 2}),
        )
        able["models"] = self._of(
            get_args(ModelName), "model.name", lambda name: with_model(base, name)
        )
        able["orders"] = self._of(
            get_args(OrderName), "world.order", lambda name: changed(base, world={"order": name})
        )
        stages = self._of((0, 1), "system.stage", lambda n: changed(base, system={"stage": n}))
        shards = 1 in stages or base.system.stage > 1
        higher = [n for n in (2, 3) if n in declared.stages and shards]
        if shards:
            self.found.unclear.append(
                "stages 2 and 3 are as 1 in all that is compared, but for costs: "
                f"{'taken as declared' if higher else 'declare those that it has'}"
            )
        able["stages"] = (*stages, *higher)
        shapes = {"empty_params": ((3,), (0,), (2,)), "scalar_params": ((3,), (), (2,))}
        for name, shape in shapes.items():
            bare = changed(base, model={"name": "params", "shapes": shape})
            able[name] = "params" in able["models"] and self.passes(bare, f"a shape in {shape}")
        able["follows"] = self._follows(declared, dtypes)
        return Capabilities(**able)

    def _of(
        self, values: Sequence[Any], path: str, case_of: Callable[[Any], Scenario]
    ) -> tuple[Any, ...]:
        return tuple(v for v in values if self.passes(case_of(v), f"{path} = {v!r}"))

    def _passes_in(
        self, dtypes: Sequence[str], vary: Vary, path: str, *, declared: Capabilities
    ) -> bool:
        """Whether a case passes in the first dtype in which it can be asked for; else notes why."""
        why = ""
        for dtype in dtypes or (self.base.model.dtype,):
            result = self.judge(changed(vary(self.base), model={"dtype": dtype}))
            # What is asked of one dtype alone, as loss scales of fp16, is refused in others.
            if not isinstance(result, str):
                return self._has_passed(result, path)
            why = result
        if path not in declared.follows:
            self.found.left_out[path] = why
            return False
        self.found.unclear.append(
            f"{path}: the case that would tell is refused: taken as declared ({why})"
        )
        return True

    def _follows(self, declared: Capabilities, dtypes: Sequence[str]) -> tuple[str, ...]:
        follows, hidden = [], []
        for path in _every_path():
            if path in _RULED:
                name = path.partition(".")[2]
                if name not in self.found.numerics and path in declared.follows:
                    follows.append(path)
            elif path in FOLLOWED:
                if self._passes_in(dtypes, FOLLOWED[path], path, declared=declared):
                    follows.append(path)
            elif path in declared.follows:
                follows.append(path)
            else:
                hidden.append(path)
        shown = [path for path in follows if path not in FOLLOWED and path not in _RULED]
        if shown:
            self.found.unclear.append(
                f"{', '.join(shown)}: change nothing that is compared here: taken as declared"
            )
        if hidden:
            self.found.unclear.append(
                f"{', '.join(hidden)}: change nothing that is compared here: declare those that it "
                "obeys"
            )
        return tuple(follows)

    def _name_alternatives(self) -> None:
        """Say which other rules pass all cases, too; of these the declared one is kept."""
        declared = _plain(numerics_of(self.target, self.base))
        # Where rules differ most comes first, so that most are told apart by one case.
        passed = sorted(self.passed, key=lambda case: (-case.world.size, -case.run.micro_batches))
        narrow = any(case.model.dtype != "fp32" for case in passed)
        if not narrow:
            self.found.unclear.append(
                f"{', '.join(_OF_DTYPES)}: all of them are fp32 where params are: as declared"
            )
        for name, known in _ALTERNATIVES.items():
            # What a target declares to be taken as told fits whatever form it has.
            taken = name == "norm" and declared.get(name) == "told"
            values = (*known, "told") if taken else known
            if name in _OF_DTYPES and not narrow:
                if name in declared:
                    self.found.numerics[name] = declared[name]
                continue
            of_clip = name in ("norm", "clip")
            cases = [each for each in passed if bool(each.optimizer.clip_norm) == of_clip]
            cases = cases[:_ALIKE_CASES]
            alike = [
                value
                for value in values
                if value != self.found.numerics.get(name, _DEFAULTS[name])
                and self._all_pass(cases, {**self.found.numerics, name: value})
            ]
            if name in declared and declared[name] in alike:
                alike[alike.index(declared[name])] = self.found.numerics.get(name, _DEFAULTS[name])
                self.found.numerics[name] = declared[name]
            alike = [value for value in alike if value != _DEFAULTS[name]]
            if alike:
                said = ", ".join(map(repr, alike))
                self.found.unclear.append(f"{name} = {said}: the same bits in all of these cases")
        self._take_the_rest(declared, passed[:_ALIKE_CASES])
        if self.found.numerics.get("norm") == "told" != declared.get("norm"):
            self.found.unclear.append("norm: no form that is known has its bits: taken as told")
        self.found.numerics = {
            name: value for name, value in self.found.numerics.items() if value != _DEFAULTS[name]
        }

    def _take_the_rest(self, declared: Mapping[str, Any], cases: Sequence[Scenario]) -> None:
        """Take what is declared of numbers and forms of its own, where cases pass with it alike."""
        for name, value in declared.items():
            got = self.found.numerics.get(name, _DEFAULTS[name])
            if name in _ALTERNATIVES or callable(value) or value == got:
                continue
            if self._all_pass(cases, {**self.found.numerics, name: value}):
                self.found.numerics[name] = value
                self.found.unclear.append(
                    f"{name} = {got!r}: the same bits in all of these cases: as declared"
                )

    def _all_pass(self, cases: Sequence[Scenario], said: Mapping[str, Any]) -> bool:
        for case in cases:
            result = self.judge(case, said)
            if isinstance(result, str) or result.verdict == "fail":
                return False
        return True

    def _pass_as_declared(self, names: Sequence[str]) -> bool:
        """Whether all cases pass by what is declared of some dtypes for each of them.

        What is declared for fp32 alone, where a name of it and "as params" are the same, says
        nothing of other dtypes.
        """
        for case in self.passed:
            declared = numerics_of(self.target, case)
            of_dtypes = {name: getattr(declared, name) for name in names}
            if not self._all_pass([case], {**self.found.numerics, **of_dtypes}):
                return False
        return True

    def _compare(self, able: Capabilities) -> None:
        """Note the capabilities, and what the target declares otherwise."""
        plain, declared = Capabilities(), capabilities_of(self.target)
        for each in fields(Capabilities):
            value = getattr(able, each.name)
            if value != getattr(plain, each.name):
                self.found.capabilities[each.name] = value
        told = _plain(numerics_of(self.target, self.base))
        found = {name: self.found.numerics.get(name, _DEFAULTS[name]) for name in told}
        others = [n for n, v in told.items() if v != found[n] and not callable(v)]
        by_dtype = [name for name in others if name in _OF_DTYPES]
        if by_dtype and self._pass_as_declared(by_dtype):
            self.found.unclear.extend(
                f"{name} = {found[name]!r}: what it declares by dtype has the same bits in all of "
                "these cases"
                for name in by_dtype
            )
            others = [name for name in others if name not in by_dtype]
        self.found.contradicted.extend(
            f"it declares {name} = {told[name]!r}; found {found[name]!r}" for name in others
        )
        for path in declared.follows:
            if path in FOLLOWED and path not in able.follows:
                self.found.contradicted.append(f"it declares to follow {path}, and does not here")


_OF_GRADS = (Check.EQUALITY_GRAD, Check.EQUALITY_STATE, Check.EQUALITY_MASTER)
_DEFAULTS = {each.name: each.default for each in fields(Numerics)}


def _plain(numerics: Numerics) -> dict[str, Any]:
    return {
        name: getattr(numerics, name)
        for name, default in _DEFAULTS.items()
        if getattr(numerics, name) != default
    }


def _said(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items()) or "the same"


def _every_path() -> Iterator[str]:
    free = ("optimizer.name", "optimizer.lr", "system.target", "system.stage")
    yield from (path for path in followed() if path not in free)
