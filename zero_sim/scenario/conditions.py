"""Conditions over several fields of a scenario: which features go with which.

Each is a row: the fields it reads, when it is broken, where that is reported and in which words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from zero_sim.errors import Problem
from zero_sim.scenario.fields import describe_value
from zero_sim.scenario.joining import own_micro_batches, place_in_group, world_size_at
from zero_sim.scenario.kinds import WHOLE_PARAM_OPTIMIZERS
from zero_sim.scenario.spec import Scenario, TopologySpec

_AXES = ["cp", "dp", "pp", "tp"]
_LOSS_SCALE_MAX = 2.0**64
_UNITS = {"bf16": 2**8, "fp16": 2**11}
"""What 16-bit dtypes add exactly, in units of which each rank and micro-batch needs one."""
_UNBOUNDED = ("moe", "fp8")
_BETAS = ("adamw", "adam", "nadam", "radam", "adamax", "lamb")
_MOMENTUM = ("sgd", "rmsprop", "muon")


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """One thing that must not be."""

    reads: tuple[str, ...]
    """Fields it looks at; the first one is where the problem is reported."""
    broken: Callable[[Scenario], bool]
    message: str
    """What was expected; `{got}` stands for the value of the first field."""
    suggestion: str
    holds_after: bool = False
    """Whether it is asked of the case after its checkpoint, too."""

    def check(self, scenario: Scenario) -> Iterator[Problem]:
        """Give the problem, if the condition is broken."""
        if self.broken(scenario):
            value: object = scenario
            for name in self.reads[0].split("."):
                value = getattr(value, name)
            yield Problem(
                path=self.reads[0],
                message=self.message.format(got=describe_value(value)),
                suggestion=self.suggestion,
            )


def _power_of_two(value: float) -> bool:
    return 1 <= value <= _LOSS_SCALE_MAX and math.frexp(value)[0] == 0.5


def _parts(scenario: Scenario) -> int:
    """Number of dp-cp groups, each of which trains params of its own."""
    return max(scenario.topology.tp, 1) * max(scenario.topology.pp, 1)


def _dp_cp_size(scenario: Scenario) -> int:
    """Number of ranks of a dp-cp group."""
    return scenario.world.size // _parts(scenario)


def _reload_splits(scenario: Scenario) -> bool:
    """Whether the world after a reload can be cut into cells, experts' groups and copies."""
    if scenario.reload is None:
        return True
    reload, topology = scenario.reload, scenario.topology
    size = reload.world_size or scenario.world.size
    ep = reload.ep or topology.ep
    redundancy = reload.redundancy or scenario.system.redundancy
    ranks, rest = divmod(size, _parts(scenario))
    cuts = (ep * redundancy, topology.cp)
    return rest == 0 and all(cut < 1 or ranks % cut == 0 for cut in cuts)


def _somebody_trains(scenario: Scenario) -> bool:
    """Whether in every micro-batch of every step some rank has data."""
    run = scenario.run
    steps = range(min(run.steps, len(run.own_micro_batches)))
    ranks = range(min(_dp_cp_size(scenario), len(run.own_micro_batches)))
    return all(
        max((own_micro_batches(run, step=step, rank=rank) for rank in ranks), default=0)
        == run.micro_batches
        for step in steps
    )


def _has_data_to_spoil(scenario: Scenario) -> bool:
    """Whether the rank that is to see a NaN has the micro-batch that holds it."""
    nan, topology = scenario.data.nan, scenario.topology
    if nan is None or not scenario.run.own_micro_batches:
        return True
    size = world_size_at(scenario, step=nan.step)
    # What is out of range by itself is another's problem.
    if not (0 <= nan.rank < size and _splits(topology, size)):
        return True
    place = place_in_group(nan.rank, topology=topology, world_size=size)
    return own_micro_batches(scenario.run, step=nan.step, rank=place) > nan.micro_batch


def _splits(topology: TopologySpec, world_size: int) -> bool:
    """Whether a world of that size can be numbered along the axes."""
    sizes = (topology.tp, topology.cp, topology.pp)
    in_axes = sorted(topology.order.split("-")) == _AXES
    return in_axes and min(sizes) >= 1 and world_size % math.prod(sizes) == 0


def _claims_one_device(scenario: Scenario) -> bool:
    """Whether ranks take a mean of equal gradients, each of the same data."""
    data, system = scenario.data, scenario.system
    means = data.loss == "mean" and system.divide != "none" and system.divide_by == "ranks"
    shares = data.loss == "mean-of-ranks" and system.divide == "none"
    alike = (
        data.ranks == "same"
        and not scenario.run.own_micro_batches
        and scenario.topology.ep == 1
        and scenario.data.nan is None
    )
    return alike and (means or shares) and system.sync == "last" and scenario.world.order_known


CONDITIONS = (
    Condition(
        reads=("optimizer.momentum", "optimizer.name"),
        broken=lambda s: s.optimizer.momentum != 0 and s.optimizer.name not in _MOMENTUM,
        message="only optimizers 'sgd', 'rmsprop' and 'muon' have momentum, got {got}.",
        suggestion='Leave it out, set betas instead, or write name = "sgd".',
    ),
    Condition(
        reads=("optimizer.nesterov", "optimizer.name", "optimizer.momentum"),
        broken=lambda s: (
            s.optimizer.nesterov
            and (s.optimizer.name not in ("sgd", "muon") or s.optimizer.momentum == 0)
        ),
        message="expected optimizer 'sgd' or 'muon' with momentum for nesterov, got {got} without.",
        suggestion='Try name = "sgd" and momentum = 0.9.',
    ),
    Condition(
        reads=("optimizer.amsgrad", "optimizer.name"),
        broken=lambda s: s.optimizer.amsgrad and s.optimizer.name not in ("adam", "adamw"),
        message="only optimizers 'adam' and 'adamw' have amsgrad, got {got}.",
        suggestion="Leave it out.",
    ),
    Condition(
        reads=("optimizer.foreach", "optimizer.name"),
        broken=lambda s: s.optimizer.foreach and s.optimizer.name in ("nadam", "radam", "asgd"),
        message="torch's foreach kernels of 'nadam', 'radam' and 'asgd' round otherwise than the "
        "loop that the reference steps with, got {got}.",
        suggestion="Leave it out.",
    ),
    Condition(
        reads=("optimizer.foreach", "optimizer.name"),
        broken=lambda s: s.optimizer.foreach and s.optimizer.name in WHOLE_PARAM_OPTIMIZERS,
        message="torch has no foreach kernels of 'muon' and 'lamb' here, got {got}.",
        suggestion="Leave it out.",
    ),
    Condition(
        reads=("optimizer.betas", "optimizer.name"),
        broken=lambda s: s.optimizer.betas != (0.9, 0.999) and s.optimizer.name not in _BETAS,
        message=f"only optimizers {', '.join(_BETAS)} have betas, got {{got}}.",
        suggestion="Leave them out.",
    ),
    Condition(
        reads=("optimizer.weight_decay", "optimizer.name"),
        broken=lambda s: s.optimizer.weight_decay != 0 and s.optimizer.name == "rprop",
        message="optimizer 'rprop' has no weight decay, got {got}.",
        suggestion="Leave it out.",
    ),
    Condition(
        reads=("optimizer.clip_value", "optimizer.clip_norm"),
        broken=lambda s: s.optimizer.clip_value is not None and s.optimizer.clip_norm is not None,
        message="expected one of clip_norm and clip_value, got both.",
        suggestion="Leave one out.",
    ),
    Condition(
        reads=("optimizer.loss_scale.initial",),
        broken=lambda s: (
            s.optimizer.loss_scale is not None and not _power_of_two(s.optimizer.loss_scale.initial)
        ),
        message="expected a power of two of 1 to 2^64, so that scaling changes no bit, got {got}.",
        suggestion="Try 1024.0.",
    ),
    Condition(
        reads=("data.loss", "model.name"),
        broken=lambda s: s.data.loss != "mean" and s.model.name not in ("mlp", "fp8", "params"),
        message="only models 'mlp', 'fp8' and 'params' have another loss than a mean, got {got}.",
        suggestion="Leave it out.",
    ),
    Condition(
        reads=("expect.one_device", "data", "system", "topology.ep", "world.order_known"),
        broken=lambda s: s.expect.one_device and not _claims_one_device(s),
        message="only of ranks that all see the same data and hold all experts, and of a mean over "
        "them in one sum of a known order, it is said that they compute what one device does, got "
        "{got}.",
        suggestion='Try data.ranks = "same", sync = "last", no ep, and either divide_by = "ranks" '
        'or data.loss = "mean-of-ranks" with divide = "none".',
        holds_after=True,
    ),
    Condition(
        reads=("model.fp8_format", "model.name"),
        broken=lambda s: s.model.fp8_format != "mixed" and s.model.name != "fp8",
        message="only model 'fp8' has params in fp8, got {got}.",
        suggestion='Leave it out, or write name = "fp8".',
    ),
    Condition(
        reads=("model.name", "model.dtype", "world.size", "run.micro_batches"),
        broken=lambda s: (
            s.model.name == "bit-hash"
            and s.world.size * s.run.micro_batches > _UNITS.get(s.model.dtype, 2**24)
        ),
        message=f"expected at most {_UNITS['bf16']} ranks times micro-batches in bf16, "
        f"{_UNITS['fp16']:,} in fp16, among which the units that they add exactly are shared, got "
        "more with model {got}.",
        suggestion='Try dtype = "fp32".',
        holds_after=True,
    ),
    Condition(
        reads=("topology.order",),
        broken=lambda s: sorted(s.topology.order.split("-")) != _AXES,
        message="expected an order of tp, cp, dp, pp joined by hyphens, got {got}.",
        suggestion="Try 'tp-cp-dp-pp'.",
    ),
    Condition(
        reads=("world.size", "topology.tp", "topology.cp", "topology.pp"),
        broken=lambda s: s.world.size % (_parts(s) * max(s.topology.cp, 1)) != 0,
        message="expected a multiple of topology.tp x cp x pp, got {got}.",
        suggestion="Try that product times the number of data-parallel ranks.",
    ),
    Condition(
        reads=("system.redundancy", "world.size", "topology.tp", "topology.pp"),
        broken=lambda s: (
            s.system.redundancy >= 1 and (s.world.size // _parts(s)) % s.system.redundancy != 0
        ),
        message="expected a divisor of the ranks of a dp-cp group, got {got}.",
        suggestion="Try 1.",
    ),
    Condition(
        reads=("topology.ep", "model.name"),
        broken=lambda s: s.topology.ep > 1 and s.model.name != "moe",
        message="only model 'moe' has experts to deal out, got {got}.",
        suggestion='Leave it out, or write name = "moe".',
    ),
    Condition(
        reads=("topology.ep", "world.size", "topology.tp", "topology.pp", "system.redundancy"),
        broken=lambda s: (
            min(s.topology.ep, s.system.redundancy) >= 1
            and _dp_cp_size(s) % (s.topology.ep * s.system.redundancy) != 0
        ),
        message="expected a divisor of the ranks of a dp-cp group, so often that each experts' "
        "group still holds system.redundancy copies, got {got}.",
        suggestion="Try 1, or a world.size that is a multiple of tp x pp x ep x redundancy.",
    ),
    Condition(
        reads=("model.experts", "topology.ep", "model.name"),
        broken=lambda s: (
            s.model.name == "moe" and s.topology.ep >= 1 and s.model.experts % s.topology.ep != 0
        ),
        message="expected a multiple of topology.ep, so that ranks hold equally many, got {got}.",
        suggestion="Try topology.ep times 2.",
    ),
    Condition(
        reads=("reload.ep", "reload", "model", "topology.ep"),
        broken=lambda s: (
            s.reload is not None
            and s.reload.ep is not None
            and s.reload.ep >= 1
            and ((s.reload.ep > 1 and s.model.name != "moe") or s.model.experts % s.reload.ep != 0)
        ),
        message="expected a divisor of model.experts of a model 'moe', got {got}.",
        suggestion="Try 1.",
    ),
    Condition(
        reads=("reload", "world", "topology", "system.redundancy"),
        broken=lambda s: not _reload_splits(s),
        message="expected ranks after the checkpoint that tp x cp x pp and "
        "tp x pp x ep x redundancy divide.",
        suggestion="Try another reload.world_size, or reload.redundancy = 1 and reload.ep = 1.",
    ),
    Condition(
        reads=("topology.shared", "topology.tp"),
        broken=lambda s: bool(s.topology.shared) and s.topology.tp == 1,
        message="expected several tensor-parallel ranks to share params, got {got} with tp = 1.",
        suggestion="Leave it out, or write tp = 2.",
    ),
    Condition(
        reads=("topology.tied", "topology.pp"),
        broken=lambda s: bool(s.topology.tied) and s.topology.pp == 1,
        message="expected several pipeline-parallel ranks to tie params, got {got} with pp = 1.",
        suggestion="Leave it out, or write pp = 2.",
    ),
    Condition(
        reads=("faults", "reload"),
        broken=lambda s: bool(s.faults) and s.reload is not None,
        message="calls are counted within one world, and a reload makes two.",
        suggestion="Leave either out.",
    ),
    Condition(
        reads=("system.redundancy", "system.stage"),
        broken=lambda s: s.system.redundancy > 1 and s.system.stage == 0,
        message="stage 0 shards nothing that could be held in copies, got {got}.",
        suggestion="Leave it out, or write stage = 1.",
        holds_after=True,
    ),
    Condition(
        reads=("system.partition", "system.stage"),
        broken=lambda s: s.system.partition != "padded" and s.system.stage == 0,
        message="stage 0 has no partition, got {got}.",
        suggestion="Leave it out, or write stage = 1.",
        holds_after=True,
    ),
    Condition(
        reads=("system.partition", "system.align_elems", "system.align_bytes"),
        broken=lambda s: (
            s.system.partition != "padded"
            and (s.system.align_elems > 1 or s.system.align_bytes > 1)
        ),
        message="expected no alignment, which is made by padding, got {got} with it.",
        suggestion='Leave align_elems and align_bytes out, or write partition = "padded".',
        holds_after=True,
    ),
    Condition(
        reads=("system.partition", "system.bucket_elems"),
        broken=lambda s: s.system.partition == "rows" and s.system.bucket_elems != 1,
        message="expected every param to be a bucket of its own, to be cut between its rows, "
        "got {got} with larger buckets.",
        suggestion="Write bucket_elems = 1.",
        holds_after=True,
    ),
    Condition(
        reads=("system.divide_by", "system.divide", "system.sync"),
        broken=lambda s: (
            s.system.divide_by == "tokens"
            and s.system.divide in ("pre", "premul")
            and s.system.sync == "every"
        ),
        message="the number of rows is known only after the last micro-batch, got {got} with a "
        "division before every sum.",
        suggestion='Try divide = "post", or sync = "last".',
    ),
    Condition(
        reads=("run.own_micro_batches", "run.micro_batches", "run.steps", "world.size", "topology"),
        broken=lambda s: not _somebody_trains(s),
        message="expected some rank of each dp-cp group to have data for all of run.micro_batches "
        "in every step, and none for more, got {got}.",
        suggestion="Try as many entries as there are ranks, run.micro_batches among them.",
        holds_after=True,
    ),
    Condition(
        reads=("run.own_micro_batches", "system.stage"),
        broken=lambda s: s.system.stage == 3 and 0 in s.run.own_micro_batches,
        message="at stage 3 a rank that joins gathers params in the order of its last micro-batch, "
        "so that it must have one of its own before, got {got}.",
        suggestion="Write at least 1 everywhere, or stage = 2.",
        holds_after=True,
    ),
    Condition(
        reads=("run.own_micro_batches", "data.nan", "world.size", "topology", "reload"),
        broken=lambda s: not _has_data_to_spoil(s),
        message="the rank of data.nan has no data for its micro-batch of its step, got {got}.",
        suggestion="Write more than data.nan.micro_batch everywhere.",
    ),
    Condition(
        reads=("run.own_micro_batches", "system.divide_by", "system.divide", "system.sync"),
        broken=lambda s: (
            bool(s.run.own_micro_batches)
            and s.system.divide_by == "micro-batches"
            and s.system.divide in ("pre", "premul")
            and s.system.sync == "every"
        ),
        message="the number of micro-batches that had data is known only after the last one, got "
        "{got} with a division before every sum.",
        suggestion='Try divide = "post", or sync = "last".',
    ),
    Condition(
        reads=("system.overlap_params", "system.stage"),
        broken=lambda s: s.system.overlap_params is True and s.system.stage == 0,
        message="stage 0 gathers no params, got {got}.",
        suggestion="Leave it out, or write stage = 1.",
        holds_after=True,
    ),
    Condition(
        reads=("system.overlap_params", "system.stage"),
        broken=lambda s: s.system.overlap_params is True and s.system.stage == 3,
        message="stage 3 gathers params as they are used, got {got}.",
        suggestion="Leave it out, or write prefetch.",
        holds_after=True,
    ),
    Condition(
        reads=("system.prefetch", "system.stage"),
        broken=lambda s: s.system.prefetch is not None and s.system.stage != 3,
        message="only stage 3 gathers params ahead of their use, got {got}.",
        suggestion="Leave it out, or write stage = 3.",
    ),
    Condition(
        reads=("system.reshard_after_forward", "system.stage"),
        broken=lambda s: not s.system.reshard_after_forward and s.system.stage != 3,
        message="only stage 3 frees params after a forward, got {got}.",
        suggestion="Leave it out, or write stage = 3.",
    ),
    Condition(
        reads=("system.sum_by", "system.stage"),
        broken=lambda s: s.system.sum_by == "all-reduce" and s.system.stage == 0,
        message="stage 0 has no shards to sum to, and sums to all ranks by itself, got {got}.",
        suggestion="Leave it out, or write stage = 1.",
        holds_after=True,
    ),
    Condition(
        reads=("system.sum_by", "world.order"),
        broken=lambda s: s.system.sum_by == "first-rank" and s.world.order != "linear",
        message="the first rank adds in rank order, whatever collectives do, got {got}.",
        suggestion='Leave it out, or write order = "linear".',
    ),
    Condition(
        reads=("system.gather_after_step", "system.stage"),
        broken=lambda s: s.system.gather_after_step and s.system.stage != 3,
        message="only stage 3 gathers nothing after a step otherwise, got {got}.",
        suggestion="Leave it out, or write stage = 3.",
    ),
    Condition(
        reads=("system.gather_chunk_elems", "system.stage"),
        broken=lambda s: s.system.gather_chunk_elems is not None and s.system.stage not in (1, 2),
        message="only stages 1 and 2 gather all params at a time, which chunks cut up, got {got}.",
        suggestion="Leave it out, or write stage = 1.",
        holds_after=True,
    ),
    Condition(
        reads=("system.gather_chunk_elems", "system.overlap_params"),
        broken=lambda s: (
            s.system.gather_chunk_elems is not None and s.system.overlap_params is True
        ),
        message="one chunk's memory serves all of them in turn, which no forward can overlap, "
        "got {got} with system.overlap_params.",
        suggestion="Leave either out.",
    ),
    Condition(
        reads=("system.gather_chunk_elems", "system.partition"),
        broken=lambda s: (
            s.system.gather_chunk_elems is not None and s.system.partition == "one-owner"
        ),
        message="expected a partition that gives every rank a stretch of each bucket, got {got} "
        'with partition = "one-owner".',
        suggestion="Leave it out, and write a smaller bucket_elems.",
        holds_after=True,
    ),
    Condition(
        reads=("system.offload_state", "optimizer.name"),
        broken=lambda s: s.system.offload_state and s.optimizer.name in WHOLE_PARAM_OPTIMIZERS,
        message="optimizers 'muon' and 'lamb' bring whole params together with the model's own "
        "collectives, which a state on the CPU does not meet, got {got}.",
        suggestion="Leave it out, or write an elementwise optimizer.",
    ),
    Condition(
        reads=("system.step_buffer_elems", "optimizer.name"),
        broken=lambda s: (
            s.system.step_buffer_elems is not None and s.optimizer.name in WHOLE_PARAM_OPTIMIZERS
        ),
        message="optimizers 'muon' and 'lamb' step whole params, all of which they bring together, "
        "got {got}.",
        suggestion="Leave it out, or write an elementwise optimizer.",
    ),
    Condition(
        reads=("reload.step", "run.steps"),
        broken=lambda s: s.reload is not None and not 1 <= s.reload.step < s.run.steps,
        message="expected at least one step before the checkpoint and one after it, got {got}.",
        suggestion="Try 1, and run.steps of at least 2.",
    ),
)


def why_order_matters(scenario: Scenario) -> str:
    """What a case has that can be judged only where the order of addition is known; or empty."""
    if scenario.reload is not None:
        return "a reload"
    if scenario.model.name in _UNBOUNDED:
        return "experts or fp8 params"
    if scenario.optimizer.name in WHOLE_PARAM_OPTIMIZERS:
        return "an optimizer that looks at whole params, of which a rank shows its part"
    return "tensor- or pipeline-parallel ranks" if _parts(scenario) > 1 else ""


def check_order_known(scenario: Scenario) -> Iterator[Problem]:
    """Check that a case can be judged by bounds, where it is to be."""
    why = why_order_matters(scenario)
    if why and not scenario.world.order_known:
        yield Problem(
            path="world.order_known",
            message=f"expected a known order of addition in a case with {why}, got false.",
            suggestion="Leave it out.",
        )


def check_freeze(scenario: Scenario) -> Iterator[Problem]:
    """Check the spans of steps in which params are frozen."""
    for index, freeze in enumerate(scenario.model.freeze):
        if not 0 <= freeze.start < freeze.stop:
            yield Problem(
                path=f"model.freeze[{index}].stop",
                message="expected start at least 0 and stop more than start, got "
                f"start = {freeze.start}, stop = {freeze.stop}.",
                suggestion=f"Try stop = {max(freeze.start, 0) + 1}; steps count from 0.",
            )


def check_groups(scenario: Scenario) -> Iterator[Problem]:
    """Check that the optimizer has what its param groups set."""
    for index, group in enumerate(scenario.optimizer.groups):
        if group.weight_decay and scenario.optimizer.name == "rprop":
            yield Problem(
                path=f"optimizer.groups[{index}].weight_decay",
                message="optimizer 'rprop' has no weight decay, got "
                f"{describe_value(group.weight_decay)}.",
                suggestion="Leave it out.",
            )
