"""Table of settings that need other settings, with reasons.

A field at its default is never refused. `zero_sim.scenario.fitting` repairs cases by this table.
`zero_sim.scenario.conditions` has all other rules over several fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, get_args

from zero_sim.errors import Problem
from zero_sim.scenario.fields import default_at, describe_value, show
from zero_sim.scenario.kinds import WHOLE_PARAM_OPTIMIZERS
from zero_sim.scenario.spec import OptimizerName, Scenario

# As in torch.optim: sgd, asgd and rprop have no eps, and rprop has no weight decay. `own` may read
# any setting.
_WITH_BETAS = ("adamw", "adam", "nadam", "radam", "adamax", "lamb", "own")
_WITH_EPS = (*_WITH_BETAS, "rmsprop", "adagrad", "adadelta", "muon")
_ALL: tuple[OptimizerName, ...] = get_args(OptimizerName)
# Muon and LAMB step whole params, so they need gathers, which some settings rule out.
_ELEMENTWISE = tuple(name for name in _ALL if name not in WHOLE_PARAM_OPTIMIZERS)
# torch's foreach kernels of nadam, radam and asgd round differently from its loop.
WITH_FOREACH = tuple(name for name in _ELEMENTWISE if name not in ("nadam", "radam", "asgd"))
# Messages list the fields that the case's model uses; repairs reset the others.
USED_BY: dict[str, tuple[str, ...]] = {
    "model.hidden": (
        *("mlp", "fp8", "digits", "moe", "ternary", "tp-block", "positional"),
        *("gpt", "multi-token"),
    ),
    "model.blocks": ("mlp", "fp8", "tp-block", "gpt"),
    "model.experts": ("moe",),
    "model.fp8_format": ("fp8",),
    "model.recompute": ("mlp", "gpt", "moe", "transformer-260"),
    "model.shapes": ("params", "bit-hash"),
    "model.nested": ("params",),
    "model.tied": ("params",),
    "model.unused": ("params",),
    "model.skip": ("params",),
    "model.one_rank": ("params",),
    "model.buffer": ("mlp", "params", "transformer-260", "digits", "unusual", "positional", "gpt"),
    "optimizer.betas": _WITH_BETAS,
    "optimizer.eps": _WITH_EPS,
    "optimizer.weight_decay": (*_WITH_EPS, "sgd", "asgd"),
    "optimizer.momentum": ("sgd", "rmsprop", "muon", "own"),
    "optimizer.nesterov": ("sgd", "muon", "own"),
    "optimizer.amsgrad": ("adam", "adamw", "own"),
}
"""Models or optimizers that use a field, by path. All use a field without an entry."""


@dataclass(frozen=True, slots=True)
class Except:
    """Every value except the given one."""

    value: object

    def __contains__(self, value: object) -> bool:
        return value != self.value


Values = tuple[object, ...] | range | Except


@dataclass(frozen=True, slots=True)
class Applies:
    """Condition under which a setting has an effect."""

    path: str
    """Path of the setting."""
    needs: Mapping[str, Values]
    """Required values of other fields, by path."""
    why: str
    """Reason, with which the message begins."""
    after: Literal["ends", "checked", "unused"] = "ends"
    """Treatment if the case after its checkpoint lacks the needs. `ends`: the setting goes back to
    its default. `checked`: report a problem. `unused`: like `ends`; because the setting changes
    nothing without its needs, repairs remove it, and a case may set it just for use after the
    checkpoint."""
    values: Values | None = None
    """Values with these needs. If None, all but the default."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Paths of all fields that the row reads."""
        return (self.path, *self.needs, *(("reload",) if self.after == "unused" else ()))

    @property
    def holds_after(self) -> bool:
        """True if the row is also checked for the case after its checkpoint."""
        return self.after == "checked"

    def broken(self, scenario: Scenario) -> bool:
        """Return True if the setting is set, but has no effect in this case."""
        values = Except(default_at(self.path)) if self.values is None else self.values
        # The default never counts as set: records do not keep which fields a file omits.
        return attrgetter(self.path)(scenario) in values and bool(self.unmet(scenario))

    def check(self, scenario: Scenario) -> Iterator[Problem]:
        """Yield a problem if the setting is set, but has no effect."""
        if self.broken(scenario):
            unmet = self.unmet(scenario)
            value = describe_value(attrgetter(self.path)(scenario))
            found = " and ".join(_found(path, attrgetter(path)(scenario)) for path in unmet)
            remedies = " and ".join(_remedy(path, self.needs[path]) for path in unmet)
            table, _, _ = self.path.partition(".")
            # A field of another model or optimizer is a common slip, so list the usable fields.
            if self.path in USED_BY and f"{table}.name" in unmet:
                found += _uses(scenario, table)
            yield Problem(
                path=self.path,
                message=f"{self.why}, got {value} with {found}.",
                suggestion=f"Leave it out, or {remedies}.",
            )

    def unmet(self, scenario: Scenario) -> list[str]:
        """Return the unmet needs, by path."""
        return [
            # `in` works for all three kinds of `Values`: tuple, range and `Except`.
            path
            for path, values in self.needs.items()
            if attrgetter(path)(scenario) not in values
        ]


def _found(path: str, value: object) -> str:
    # TOML has no null: an omitted table or list has no value to print.
    if value in (None, ()):
        return f"no {path}"
    return path if dataclasses.is_dataclass(value) else f"{path} = {show(value)}"


def _remedy(path: str, values: Values) -> str:
    if isinstance(values, Except):
        return f"{'set' if default_at(path) not in values else 'change'} {path}"
    # The first allowed value is the plainest, so the remedy names it.
    first = values[0]
    return f"leave out {path}" if first in (None, ()) else f"write {path} = {show(first)}"


def _only(path: str) -> str:
    """Return the reason why a field needs the models or optimizers in `USED_BY`."""
    kind = path.partition(".")[0]
    # Messages are sentences: `'mlp', 'gpt' and 'moe'`.
    *others, last = (f"'{user}'" for user in USED_BY[path])
    if not others:
        return f"only {kind} {last} uses it"
    return f"only {kind}s {', '.join(others)} and {last} use it"


def _uses(scenario: Scenario, table: str) -> str:
    """Return a message's end: the fields that the case's model or optimizer uses."""
    record = getattr(scenario, table)
    names = (field.name for field in dataclasses.fields(record) if field.name != "name")
    used = (n for n in names if record.name in USED_BY.get(f"{table}.{n}", (record.name,)))
    return f"; '{record.name}' uses {', '.join(used)}"


# TOML integers have 64 bits, so this is "more than one".
_SEVERAL = range(2, 2**63)
_SHARDED = {"system.stage": (1, 2, 3)}
_AT_1_AND_2 = {"system.stage": (1, 2)}
_AT_3 = {"system.stage": (3,)}
_ANY_BUT_TP_BLOCK = {"model.name": Except("tp-block")}

APPLIES = (
    *(
        Applies(path, {f"{path.partition('.')[0]}.name": users}, _only(path), after="unused")
        for path, users in USED_BY.items()
        # Nesterov momentum also needs momentum, so it has its own row below.
        if path != "optimizer.nesterov"
    ),
    Applies(
        "model.tied_first",
        {"model.tied": Except(())},
        "expected params with second names in model.tied",
        after="unused",
    ),
    Applies(
        "model.one_rank",
        {"data.ranks": ("distinct",)},
        "ranks with the same data read the same params",
    ),
    Applies(
        "model.freeze",
        _ANY_BUT_TP_BLOCK,
        "a frozen param of model 'tp-block' would skip sums over the ranks",
    ),
    Applies(
        "data.loss",
        {"model.name": ("mlp", "fp8", "params")},
        "only models 'mlp', 'fp8' and 'params' have a loss other than the mean",
    ),
    Applies(
        "data.epoch_steps",
        {"data.rows": _SEVERAL},
        # An epoch's last step has half the rows, and needs at least one row.
        "a micro-batch of one row has no half",
        after="unused",
    ),
    Applies(
        "data.epoch_steps",
        _ANY_BUT_TP_BLOCK,
        "activation bytes of model 'tp-block' are counted for one size of micro-batch",
    ),
    Applies(
        "world.order_known",
        _ANY_BUT_TP_BLOCK,
        "the reference trains all parts of model 'tp-block' in a known order",
        values=(False,),
    ),
    Applies(
        "topology.pp",
        _ANY_BUT_TP_BLOCK,
        "model 'tp-block' is split within layers, so each rank has all blocks",
        values=_SEVERAL,
    ),
    Applies(
        "topology.ep",
        {"model.name": ("moe",)},
        "only model 'moe' has experts",
        values=_SEVERAL,
    ),
    Applies(
        "topology.shared",
        {"topology.tp": _SEVERAL},
        "only several tensor-parallel ranks share params",
    ),
    Applies(
        "topology.tied",
        {"topology.pp": _SEVERAL},
        "only several pipeline-parallel ranks tie params",
    ),
    Applies(
        "optimizer.nesterov",
        {"optimizer.name": USED_BY["optimizer.nesterov"], "optimizer.momentum": Except(0.0)},
        "Nesterov momentum needs optimizer 'sgd', 'muon' or 'own', and momentum",
    ),
    Applies(
        "optimizer.foreach",
        {"optimizer.name": WITH_FOREACH},
        # On the CPU the reference steps with the loop, so the kernels must have the same bits.
        "torch's foreach kernels of 'nadam', 'radam' and 'asgd' do not round like the reference's "
        "loop, and 'muon' and 'lamb' have none",
    ),
    Applies(
        "optimizer.clip_value",
        {"optimizer.clip_norm": (None,)},
        "gradients are clipped either by norm or by value",
    ),
    Applies(
        "run.own_micro_batches",
        _ANY_BUT_TP_BLOCK,
        "model 'tp-block' counts its sums over ranks, so each rank needs as many micro-batches",
    ),
    Applies(
        "run.evaluate",
        _ANY_BUT_TP_BLOCK,
        "model 'tp-block' counts its sums over ranks, and a forward under no_grad adds some",
    ),
    Applies(
        "run.evaluate",
        {"run.own_micro_batches": ((),)},
        "ranks without data for a micro-batch cannot run a forward under no_grad",
    ),
    Applies(
        "expect.accuracy_min", {"model.name": ("digits",)}, "only model 'digits' has held-out data"
    ),
    Applies(
        "expect.one_device",
        {
            "data.ranks": ("same",),
            "data.nan": (None,),
            "run.own_micro_batches": ((),),
            "topology.ep": (1,),
            "system.sync": ("last",),
            "world.order_known": (True,),
            **_ANY_BUT_TP_BLOCK,
        },
        "expect.one_device needs ranks with the same data and all params, and gradients averaged "
        "in one sum of known order",
        after="checked",
    ),
    Applies(
        "system.divide_by",
        {"system.divide": Except("none")},
        # With `none`, the sum is the gradient.
        "expected a system that divides gradients",
        after="unused",
    ),
    Applies(
        "system.redundancy",
        _SHARDED,
        "stage 0 has no sharded state, so no replicas of it",
        after="checked",
        values=_SEVERAL,
    ),
    Applies("system.partition", _SHARDED, "stage 0 has no partition", after="checked"),
    Applies(
        "system.partition",
        {"system.align_elems": (1,), "system.align_bytes": (1,)},
        # `uneven` has no padding; with `rows` and `one-owner`, rows and owners fix shards' starts.
        "only partition 'padded' has padding for alignment",
        after="checked",
    ),
    Applies(
        "system.overlap_params",
        _AT_1_AND_2,
        "stage 0 gathers no params, and stage 3 gathers them when they are used",
        after="checked",
        values=(True,),
    ),
    Applies("system.prefetch", _AT_3, "only stage 3 gathers params ahead of their use"),
    Applies("system.reshard_after_forward", _AT_3, "only stage 3 reshards params after a forward"),
    Applies(
        "system.gather_after_step", _AT_3, "at other stages than 3, params are unsharded anyway"
    ),
    Applies(
        "system.sum_by",
        _SHARDED,
        "stage 0 has no shards, and always sums by all-reduce",
        values=("all-reduce",),
    ),
    Applies(
        "system.sum_by",
        {"world.order": ("linear",)},
        # This rank receives all gradients and adds them itself, so no collective orders them.
        "the first rank always adds in rank order",
        values=("first-rank",),
    ),
    Applies(
        "system.reduce_buffer_elems",
        _AT_1_AND_2,
        # As DeepSpeed's `reduce_bucket_size`.
        "only stages 1 and 2 have both unsharded params and owners of gradients",
    ),
    Applies(
        "system.reduce_buffer_elems",
        {"system.sum_by": Except("first-rank")},
        "a reduce buffer is reduced to the owners of its gradients, or to all ranks",
        after="checked",
    ),
    Applies(
        "system.reduce_buffer_elems",
        {"system.redundancy": (1,)},
        "sums through reduce buffers end with one owner and do not reach replicas",
        after="checked",
    ),
    Applies(
        "system.contiguous_grads",
        {"system.reduce_buffer_elems": Except(None)},
        "expected reduce buffers, because gradients are copied into them",
        after="unused",
    ),
    Applies(
        "system.gather_chunk_elems",
        _AT_1_AND_2,
        "only stages 1 and 2 gather all params at once, so only there can chunks split the gather",
    ),
    Applies(
        "system.gather_chunk_elems",
        {"system.overlap_params": Except(True)},
        # As DeepSpeed's `allgather_bucket_size`.
        "all chunks use the same memory in turn, so no forward can overlap the gather",
        after="checked",
    ),
    Applies(
        "system.gather_chunk_elems",
        {"system.partition": Except("one-owner")},
        "expected a partition in which every rank has a shard of each bucket",
        after="checked",
    ),
    Applies(
        "system.arena",
        {"system.stage": (2, 3), "system.reduce_buffer_elems": (None,)},
        # ZeRO (arXiv 1910.02054), section 6.3: memory defragmentation, M_D.
        "only stages 2 and 3 without reduce buffers have unsharded gradients that come and go",
        after="unused",
    ),
    Applies(
        "system.buffers_by",
        {"optimizer.groups": Except(())},
        # Without groups, all params of a kind and dtype share one buffer anyway.
        "expected param groups, because each has its own buffers",
        after="unused",
    ),
    Applies(
        "system.offload_state",
        {"optimizer.name": _ELEMENTWISE},
        "optimizers 'muon' and 'lamb' gather whole params by collectives, so not from CPU state",
    ),
    Applies(
        "system.step_buffer_elems",
        {"optimizer.name": _ELEMENTWISE},
        # ZeRO, section 6.2: constant size buffers, C_B.
        "optimizers 'muon' and 'lamb' need whole params, so they step them all together",
    ),
    Applies(
        "system.checkpoints",
        {"model.name": ("tp-block",)},
        # ZeRO, section 6.1: partitioned activation checkpointing, P_a.
        "expected model 'tp-block', because only its blocks can be run again",
        after="unused",
    ),
    Applies(
        "system.checkpoints",
        {"system.stage": (0, 1, 2)},
        "stage 3 reshards a block's params, but backward has to run the block again",
    ),
    Applies(
        "system.offload_checkpoints",
        {"system.checkpoints": Except("none")},
        "expected checkpoints to be kept on the CPU",
        after="unused",
    ),
)
"""Settings that need other settings."""
