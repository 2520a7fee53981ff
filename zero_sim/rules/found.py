"""Search for a system's rules: run directed cases and read their findings.

A failing case names a rule that gives the same bits, and runs again with this rule, until it passes
or no known rule fits. If several rules pass all cases, this is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

from zero_sim.backends.worlds import WorldPool
from zero_sim.errors import UsageError
from zero_sim.findings.records import CaseResult
from zero_sim.reference import CLIP_FORMS, DIVIDE_RULES, NORMS, ScaleLoss
from zero_sim.rules.cases import (
    DIVISOR,
    FOLLOWED,
    SECOND,
    Vary,
    clip_cases,
    in_ranks,
    of_optimizer,
    overflow_case,
    plain_models,
    plain_optimizer,
    rule_cases,
    second_loss_case,
    settings_followed,
    unused_cases,
)
from zero_sim.rules.declared import WithNumerics, in_words
from zero_sim.rules.norms import NORMS_MIN, confirm_norm, norms_passed
from zero_sim.rules.report import FoundRules
from zero_sim.rules.search import RuleSearch
from zero_sim.run.small_cases import BASE, changed, with_model
from zero_sim.scenario.spec import (
    DtypeName,
    ModelName,
    OptimizerName,
    OrderName,
    Scenario,
)
from zero_sim.targets import Capabilities, Numerics, Target, capabilities_of, numerics_of
from zero_sim.targets.declared import followed, refusals

_ALIKE_CASES = 8
"""Most cases that two rules must pass to be called equal."""
_OF_DTYPES = ("grad_dtype", "accumulate_dtype", "reduce_dtype", "reported_dtype")
_RULED = ("system.divide", "system.divide_by", "system.sync", "system.grad_dtype")
"""Options that declared rules replace."""
_ALTERNATIVES: Mapping[str, Sequence[object]] = {
    "scale_loss": (None, "micro-batches", "tokens"),
    "divide": (*DIVIDE_RULES, "avg"),
    "divide_by": ("ranks", "micro-batches", "tokens"),
    "sync": ("last", "every"),
    "divide_each": ("step", "round"),
    "grad_dtype": ("param", "fp32"),
    "accumulate_dtype": (None, "param", "fp32"),
    "reduce_dtype": (None, "param", "fp32"),
    "unused": ("zeros", "left-alone"),
    "reported_grads": ("before-division", "after-division", "after-clip"),
    "reported_dtype": ("sum", "param", "fp32"),
    "norm": tuple(norm for norm in NORMS if norm != "reported"),
    "clip": CLIP_FORMS,
}


def find_rules(target: Target) -> FoundRules:
    """Find a target's rules and capabilities.

    Args:
        target: Any target. Its declarations are only used if no compared value decides.

    Raises:
        UsageError: No plain case passes under any known rule.
    """
    with WorldPool() as pool:
        return _Search(target=target, pool=pool).run()


@dataclass(slots=True)
class _Search:
    target: Target
    pool: WorldPool
    found: FoundRules = field(init=False)
    search: RuleSearch = field(init=False)
    base: Scenario = BASE
    misclips: bool = False
    """True if no known clipping rule fits."""
    failed: set[str] = field(default_factory=set)
    """Unsupported settings, except for refused settings."""

    def __post_init__(self) -> None:
        self.found = FoundRules(target=self.target.name)
        self.search = RuleSearch(target=self.target, pool=self.pool)

    def run(self) -> FoundRules:
        self._find_base()
        dtypes = [dtype for dtype in get_args(DtypeName) if self._settle_dtype(dtype)]
        self._settle_clip()
        self._settle_overflow()
        self._settle_second_loss()
        # If several rules pass, prefer the declared rule, because they may differ in the cases
        # below.
        self._name_alternatives()
        able = self._able(dtypes)
        self._compare(able)
        self.found.numerics, self.found.cases = self.search.numerics, self.search.cases
        for case, why in self.search.limited.items():
            names = self.found.limits.setdefault(why, [])
            names += [] if case.name in names else [case.name]
        return self.found

    def passes(self, case: Scenario, what: str) -> bool:
        """Return True if a case passes under the rules found so far; otherwise note the reason."""
        return self._has_passed(self.search.judge(case), what)

    def _has_passed(self, result: CaseResult | str, what: str) -> bool:
        if isinstance(result, str):
            self.found.left_out[what] = result
            return False
        if result.verdict == "pass":
            return True
        self.failed.add(what)
        first = result.findings[0] if result.findings else None
        why = f"{first.check}: {first.message}" if first else result.verdict
        self.found.left_out[what] = why
        return False

    def _find_base(self) -> None:
        """Find the first plain case that passes under some rule, with several ranks if possible."""
        why = ""
        declared = capabilities_of(self.target)
        others = [stage for stage in (1, 0) if stage not in declared.stages]
        # Sharded stages first, because replicas show nothing if nothing is sharded.
        stages = (*sorted(declared.stages, key=lambda stage: (stage == 0, stage)), *others)
        alarm, other = "", ""
        for size in (3, 2, 1):
            if alarm and size == 2:
                # Two ranks may hide a fault that three ranks show.
                continue
            for stage in stages:
                # If other sums do not help in this stage, they do not help in the next.
                came = self._settle_base(size, stage, sums=size > 1 and not alarm)
                if not came:
                    self.found.alarms.extend([alarm] if alarm else [])
                    return
                meant = size <= (declared.world_size_max or size) and not self._is_limited()
                if meant and not alarm and not self._refuses(self.base):
                    alarm = self._wrong_with(size, came)
                why, other = why or came, other or self._nearest_update()
        raise UsageError(
            f"expected target {self.target.name!r} to pass a plain case by some known rule, got "
            + (other or f"{why}. Try `zero-sim run` on one case.")
        )

    def _nearest_update(self) -> str:
        nearest = self.search.nearest
        return "" if nearest is None else nearest.as_rounding(self.base.optimizer)

    def _settle_base(self, size: int, stage: int, *, sums: bool) -> str:
        """Find rules for a plain case, with other sizes if the system requires divisible sizes."""
        world, system, came = {"size": size}, {"stage": stage}, ""
        for name, model in plain_models(self.target).items():
            named = f"{in_ranks(size)}{name}"
            own = plain_optimizer(self.target)
            self.base = changed(BASE, named, model=model, world=world, system=system, optimizer=own)
            came = self.search.settle(self.base, sums=sums)
            if not self._is_limited():
                break
        return came

    def _is_limited(self) -> bool:
        return self.base in self.search.limited

    def _wrong_with(self, ranks: int, why: str) -> str:
        nearest = self.search.nearest
        came = nearest.in_words() if nearest else why
        return (
            f"no known rule gives the results of {ranks} ranks; {came}. All findings here come "
            "from one rank, where nothing is summed or sharded: declare none until this is fixed"
        )

    def _refuses(self, case: Scenario) -> bool:
        """Return True if the target itself refuses a case, whatever its declarations."""
        return bool(refusals(WithNumerics(self.target, Numerics()), case))

    def _settle_dtype(self, dtype: DtypeName) -> bool:
        """Find a dtype's rules; return False if the dtype is not supported."""
        ranks = self._ranks_max(dtype)
        before = dict(self.search.numerics)
        cases = list(rule_cases(self.base, dtype=dtype, ranks_max=ranks))
        # Refused cases are no evidence about rules, unless all are refused.
        cases = [case for case in cases if not self._refuses(case)] or cases
        why = self.search.settle(*cases, sums=True)
        if why:
            nearest = self.search.nearest
            why = nearest.shortly() if nearest else why
            # Systems need not support several micro-batches.
            cases = [case for case in cases if case.run.micro_batches == 1]
            if self.search.settle(*cases, sums=True):
                self.found.left_out[f"model.dtype = {dtype!r}"] = why
                return False
            self.found.unclear.append(
                f"{dtype}: no rule fits several micro-batches, so cases use only one ({why})"
            )
        for unused in unused_cases(cases[0]):
            why = self.search.settle(unused)
            if why:
                self.found.left_out[unused.name] = why
        self._settle_together(dtype, cases, before=before)
        return True

    def _ranks_max(self, dtype: DtypeName) -> int:
        """Return the number of ranks in large cases: as many as the sizes allow, or 1."""
        most, base = capabilities_of(self.target).world_size_max or 7, self.base.world.size
        for ranks in (min(7, most), min(6, most), min(4, most)) if base > 1 else ():
            name = f"{dtype}, {in_ranks(ranks)}"
            many = changed(self.base, name, model={"dtype": dtype}, world={"size": ranks})
            self.search.judge(many)
            if many not in self.search.limited:
                return ranks
        return base

    def _settle_together(
        self, dtype: DtypeName, cases: Sequence[Scenario], *, before: dict[str, Any]
    ) -> None:
        """Find rules for all dtypes so far, or keep the earlier rules and report the conflict."""
        earlier = _longest([case for case in self.search.passed if case.model.dtype != dtype])
        for case in earlier:
            result = self.search.judge(case)
            if not isinstance(result, str) and result.verdict != "fail":
                continue
            now = {n: v for n, v in self.search.numerics.items() if before.get(n) != v}
            # The first fitting rule was taken. Another rule may fit all dtypes.
            self.search.numerics = before
            if self.search.settle(*cases, *earlier, sums=True):
                self.found.unclear.append(
                    f"rules depend on the dtype: {dtype} needs {in_words(now)}, but then "
                    f"{case.name!r} differs; declare numerics(scenario)"
                )
            return

    def _settle_second_loss(self) -> None:
        declared = capabilities_of(self.target)
        case = second_loss_case(self.base)
        if "topology.cp" not in declared.follows or case.model.name not in declared.models:
            return
        for factor in (None, *get_args(ScaleLoss)):
            candidate = {**self.search.numerics, "scale_second": factor}
            if self._has_passed(self.search.judge(case, candidate), case.name):
                self.found.left_out.pop(case.name, None)
                self.search.numerics = candidate
                self.search.passed.append(case)
                return

    def _settle_clip(self) -> None:
        why = self.search.settle(*clip_cases(self.base)) or self._confirm_norm_rule()
        if why:
            self.found.left_out["optimizer.clip_norm"] = why
            self.misclips = self.search.nearest is not None

    def _confirm_norm_rule(self) -> str:
        ranks_max = min(4, capabilities_of(self.target).world_size_max or 4)
        return confirm_norm(
            self.search,
            self.base,
            ranks_max=ranks_max if self.base.world.size > 1 else 1,
            refuses=self._refuses,
        )

    def _settle_overflow(self) -> None:
        case = overflow_case(self.base)
        for rule in ("skipped", "raises"):
            result = self.search.judge(case, {**self.search.numerics, "nonfinite": rule})
            if not isinstance(result, str) and result.verdict == "pass":
                self.search.numerics["nonfinite"] = rule
                return

    def _able(self, dtypes: Sequence[str]) -> Capabilities:
        declared = capabilities_of(self.target)
        # After one step, most optimizers show little more than a gradient's sign.
        base = self.base = changed(self.base, run={"steps": 2})
        able: dict[str, Any] = {"dtypes": tuple(dtypes)}
        most = declared.world_size_max
        if most is not None and base.world.size <= most:
            able["world_size_max"] = most
        elif base.world.size < 3 and not self.found.alarms:
            able["world_size_max"] = base.world.size
            self.found.unclear.append("world_size_max: it refuses 3 ranks: declare its limit")
        able["optimizers"] = self._of(
            get_args(OptimizerName),
            "optimizer.name",
            lambda name: changed(base, optimizer={"name": name}),
        )
        able["models"] = tuple(
            name
            for name in get_args(ModelName)
            if self._passes_in_some_size(
                (with_model(base, name, divisor=divisor) for divisor in (1, DIVISOR)),
                f"model.name = {name!r}",
            )
        )
        able["orders"] = self._of(
            get_args(OrderName), "world.order", lambda name: changed(base, world={"order": name})
        )
        stages = self._of((0, 1), "system.stage", lambda n: changed(base, system={"stage": n}))
        shards = 1 in stages or base.system.stage > 1
        higher = [n for n in (2, 3) if n in declared.stages and shards]
        if shards:
            self.found.unclear.append(
                "stages 2 and 3 differ from 1 only in costs: "
                f"{'taken as declared' if higher else 'declare the stages it has'}"
            )
        able["stages"] = (*stages, *higher)
        shapes = {"empty_params": ((3,), (0,), (2,)), "scalar_params": ((3,), (), (2,))}
        for name, shape in shapes.items():
            sizes = (shape, tuple(tuple(DIVISOR * n for n in each) for each in shape))
            bare = (changed(base, model={"name": "params", "shapes": each}) for each in sizes)
            what = f"a shape in {shape}"
            able[name] = "params" in able["models"] and self._passes_in_some_size(bare, what)
        able["follows"] = self._follows(declared, dtypes)
        able["optimizers"] = tuple(
            name for name in able["optimizers"] if self._takes_settings(name, able["follows"])
        )
        return Capabilities(**able)

    def _of(
        self, values: Sequence[Any], path: str, case_of: Callable[[Any], Scenario]
    ) -> tuple[Any, ...]:
        return tuple(v for v in values if self.passes(case_of(v), f"{path} = {v!r}"))

    def _passes_in_some_size(self, cases: Iterable[Scenario], what: str) -> bool:
        """Return True if a case passes; skip refused sizes."""
        for case in cases:
            self.found.left_out.pop(what, None)
            if self.passes(case, what):
                return True
            if case not in self.search.limited:
                return False
        return False

    def _passes_in(
        self, dtypes: Sequence[str], vary: Vary, path: str, *, declared: Capabilities
    ) -> bool:
        """Return True if a case passes in the first supported dtype; otherwise note the reason."""
        why = ""
        for dtype in dtypes or (self.base.model.dtype,):
            result = self.search.judge(changed(vary(self.base), model={"dtype": dtype}))
            # Options for one dtype, such as fp16 loss scales, are refused in other dtypes.
            if not isinstance(result, str):
                return self._has_passed(result, path) and self._passes_second(dtype, path)
            why = result
        if path not in declared.follows:
            self.found.left_out[path] = why
            return False
        self.found.unclear.append(f"{path}: the deciding case is refused: as declared ({why})")
        return True

    def _passes_second(self, dtype: str, path: str) -> bool:
        """Return True if the option's second case passes, or if there is none."""
        if path not in SECOND:
            return True
        case = changed(SECOND[path](self.base), model={"dtype": dtype})
        result = self.search.judge(case)
        if isinstance(result, str):
            self.found.unclear.append(f"{path}, {case.name}: refused ({result})")
            return True
        return self._has_passed(result, path)

    def _takes_settings(self, name: OptimizerName, follows: Sequence[str]) -> bool:
        """Return True if an optimizer passes with all settings in `follows`."""
        paths = settings_followed(name, follows)
        result = self.search.judge(of_optimizer(self.base, name, paths))
        if isinstance(result, str):
            text = ", ".join(paths)
            self.found.unclear.append(f"optimizer.name = {name!r} with {text}: refused ({result})")
            return True
        if result.verdict != "fail":
            return True
        # A single setting is a better explanation.
        for path in paths:
            alone = self.search.judge(of_optimizer(self.base, name, [path]))
            if not isinstance(alone, str) and alone.verdict == "fail":
                result, paths = alone, [path]
                break
        what = f"optimizer.name = {name!r}"
        self._has_passed(result, what)
        why = self.found.left_out[what]
        self.found.left_out[what] = f"with {', '.join(paths)}, which it follows otherwise: {why}"
        return False

    def _follows(self, declared: Capabilities, dtypes: Sequence[str]) -> tuple[str, ...]:
        follows, hidden = [], []
        for path in _every_path():
            if path in _RULED:
                name = path.partition(".")[2]
                if name not in self.search.numerics and path in declared.follows:
                    follows.append(path)
            elif path in FOLLOWED:
                if path == "optimizer.clip_norm" and self.misclips:
                    continue
                if self._passes_in(dtypes, FOLLOWED[path], path, declared=declared):
                    follows.append(path)
            elif path in declared.follows:
                follows.append(path)
            else:
                hidden.append(path)
        shown = [path for path in follows if path not in FOLLOWED and path not in _RULED]
        if shown:
            self.found.unclear.append(
                f"{', '.join(shown)}: no effect on compared values: taken as declared"
            )
        if hidden:
            self.found.unclear.append(
                f"{', '.join(hidden)}: no effect on compared values: declare any that it follows"
            )
        return tuple(follows)

    def _name_alternatives(self) -> None:
        """Report other rules that also pass all cases, and prefer the declared rule."""
        declared = _plain(numerics_of(self.target, self.base))
        # Cases in which rules differ most come first, because the first case then decides most
        # rules.
        passed = sorted(
            _longest(self.search.passed),
            key=lambda case: (-case.world.size, -case.run.micro_batches),
        )
        narrow = any(case.model.dtype != "fp32" for case in passed)
        if not narrow:
            self.found.unclear.append(
                f"{', '.join(_OF_DTYPES)}: all mean fp32 if params are fp32: as declared"
            )
        for name, known in _ALTERNATIVES.items():
            # A norm declared as `reported` passes in any form.
            taken = name == "norm" and declared.get(name) == "reported"
            values = (*known, "reported") if taken else known
            if name in _OF_DTYPES and not narrow:
                if name in declared:
                    self.search.numerics[name] = declared[name]
                continue
            of_clip = name in ("norm", "clip")
            cases = [each for each in passed if bool(each.optimizer.clip_norm) == of_clip]
            # Forms that differ in few gradients are distinguished only by all cases.
            cases = cases if of_clip else cases[:_ALIKE_CASES]
            if name == "norm" and self.search.numerics.get(name) == "reported":
                continue
            if not cases:
                self.found.unclear.append(f"{name}: no deciding case passes: as declared")
                continue
            alike = [
                value
                for value in values
                if value != self.search.numerics.get(name, _DEFAULTS[name])
                and self._all_pass(cases, {**self.search.numerics, name: value})
            ]
            if name in declared and declared[name] in alike:
                alike[alike.index(declared[name])] = self.search.numerics.get(name, _DEFAULTS[name])
                self.search.numerics[name] = declared[name]
            alike = [value for value in alike if value != _DEFAULTS[name]]
            if alike:
                text = ", ".join(map(repr, alike))
                self.found.unclear.append(f"{name} = {text}: the same bits in all of these cases")
        self._take_the_rest(declared, passed[:_ALIKE_CASES])
        if self.search.numerics.get("norm") == "reported" != declared.get("norm"):
            count = norms_passed(self.search)
            why = f"no known form has the bits of all norms of {count} random gradients"
            if count < NORMS_MIN:
                why = f"only {count} random gradients passed; {NORMS_MIN} distinguish forms"
            self.found.unclear.append(f"norm: {why}: taken as reported")
        self.search.numerics = {
            name: value for name, value in self.search.numerics.items() if value != _DEFAULTS[name]
        }

    def _take_the_rest(self, declared: Mapping[str, Any], cases: Sequence[Scenario]) -> None:
        """Take declared numbers if the cases pass with them as well."""
        for name, value in declared.items():
            got = self.search.numerics.get(name, _DEFAULTS[name])
            if name in _ALTERNATIVES or callable(value) or value == got:
                continue
            if self._all_pass(cases, {**self.search.numerics, name: value}):
                self.search.numerics[name] = value
                self.found.unclear.append(
                    f"{name} = {got!r}: the same bits in all cases: as declared"
                )

    def _all_pass(self, cases: Sequence[Scenario], candidate: Mapping[str, Any]) -> bool:
        for case in cases:
            result = self.search.judge(case, candidate)
            if isinstance(result, str) or result.verdict == "fail":
                return False
        return True

    def _pass_as_declared(self, names: Sequence[str]) -> bool:
        """Return True if every case passes under its own declared dtypes."""
        # A declaration for fp32 does not apply to other dtypes, because in fp32 all names mean
        # fp32.
        for case in self.search.passed:
            declared = numerics_of(self.target, case)
            of_dtypes = {name: getattr(declared, name) for name in names}
            if not self._all_pass([case], {**self.search.numerics, **of_dtypes}):
                return False
        return True

    def _compare(self, able: Capabilities) -> None:
        """Record the capabilities, and any declaration with another value."""
        plain, declared = Capabilities(), capabilities_of(self.target)
        for each in fields(Capabilities):
            value = getattr(able, each.name)
            if value != getattr(plain, each.name):
                self.found.capabilities[each.name] = value
            self._compare_words(each.name, value, getattr(declared, each.name))
        self._alarm_of_none([name for name in _NEEDED if not getattr(able, name)])
        declared_now = _plain(numerics_of(self.target, self.base))
        found = {name: self.search.numerics.get(name, _DEFAULTS[name]) for name in declared_now}
        others = [n for n, v in declared_now.items() if v != found[n] and not callable(v)]
        by_dtype = [name for name in others if name in _OF_DTYPES]
        if by_dtype and self._pass_as_declared(by_dtype):
            self.found.unclear.extend(
                f"{name} = {found[name]!r}: its declaration by dtype has the same bits"
                for name in by_dtype
            )
            others = [name for name in others if name not in by_dtype]
        self.found.contradicted.extend(
            f"it declares {name} = {declared_now[name]!r}; found {found[name]!r}" for name in others
        )
        for path in declared.follows:
            if path in FOLLOWED and path not in able.follows:
                self.found.contradicted.append(f"it declares to follow {path}, but does not here")

    def _alarm_of_none(self, names: Sequence[str]) -> None:
        """Record capabilities without any value, with the first case's result."""
        left_out = {
            name: [each for each in self.found.left_out.items() if each[0].startswith(prefix)]
            for name in names
            if (prefix := f"{_NEEDED[name]} = ")
        }
        limits = set(self.search.limited.values())
        # A refusal of sizes is a limit to declare, not an alarm.
        names = [
            name
            for name, came in left_out.items()
            if not came or any(why not in limits for _, why in came)
        ]
        if not names:
            return
        came = left_out[names[0]]
        self.found.alarms.append(
            f"{', '.join(names)} = (): nothing passes under the rules found, so either they are "
            "not the system's rules, or the system is faulty"
            + "".join(f": {w}: {why}" for w, why in came[:1])
        )

    def _compare_words(self, name: str, able: Any, declared: Any) -> None:
        """Record declared values whose cases differ."""
        if name not in _CONFIRMED or getattr(self.target, "capabilities", None) is None:
            return
        for value in declared:
            what = f"{_NEEDED[name]} = {value!r}"
            if value not in able and what in self.failed:
                self.found.contradicted.append(
                    f"it declares {name} with {value!r}; {self.found.left_out[what]}"
                )


_CONFIRMED = ("models", "optimizers", "stages")
_NEEDED = {
    "dtypes": "model.dtype",
    "optimizers": "optimizer.name",
    "models": "model.name",
    "stages": "system.stage",
    "orders": "world.order",
}
"""Capabilities of every system, each with the scenario field that requests it."""
_DEFAULTS = {each.name: each.default for each in fields(Numerics)} | {
    "reported_grads": Numerics().reported_at
}


def _plain(numerics: Numerics) -> dict[str, Any]:
    return {
        name: getattr(numerics, name)
        for name, default in _DEFAULTS.items()
        if getattr(numerics, name) not in (None, default)
    }


def _longest(cases: Sequence[Scenario]) -> list[Scenario]:
    """Return the longest of cases that differ only in steps, because more steps show more."""
    kept: dict[Scenario, Scenario] = {}
    for case in sorted(cases, key=lambda case: case.run.steps):
        kept[changed(replace(case, name=""), run={"steps": 0})] = case
    return [case for case in cases if case in kept.values()]


def _every_path() -> Iterator[str]:
    free = ("optimizer.name", "optimizer.lr", "system.target", "system.stage")
    yield from (path for path in followed() if path not in free)
