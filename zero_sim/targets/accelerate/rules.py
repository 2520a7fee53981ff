"""Rules by which accelerate computes a case, and what it raises at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from zero_sim.errors import Problem
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.declared import UPSTREAM

MICRO_BATCHES_MAX = 40
"""Up to which fp32 gives 1 for 1/n times n; 1/41 times 41 is less."""


def why_no_mean(scenario: Scenario) -> str:
    """Why losses that are divided have no rule in a case; '' where they have one."""
    count = scenario.run.micro_batches
    if count & (count - 1) == 0:
        return ""
    return "no power of two of micro-batches, whose reciprocal goes rounded through backward"


def too_many(scenario: Scenario) -> Iterator[Problem]:
    """Whether a case has more micro-batches than what `backward` divides by can be undone for."""
    if scenario.run.micro_batches > MICRO_BATCHES_MAX:
        yield Problem(
            path="run.micro_batches",
            message="accelerate divides each loss by their number, which a product with it undoes "
            f"in fp32 up to {MICRO_BATCHES_MAX}, got {scenario.run.micro_batches}.",
            suggestion=f"Try {MICRO_BATCHES_MAX}.",
        )


def unsharded(scenario: Scenario) -> Iterator[Problem]:
    """Whether a case has as many copies as ranks, for which accelerate has no FSDP2."""
    copies = scenario.system.redundancy
    if 1 < copies == scenario.world.size:
        yield Problem(
            path="system.redundancy",
            message="expected fewer copies than ranks, as accelerate asks for a dimension to shard "
            f"over, got {copies} of each.",
            suggestion="Leave it out, or try target accelerate-ddp.",
        )


def left_out_of_files(scenario: Scenario) -> Iterator[Problem]:
    """Whether accelerate 1.15.0 saves one of several params without elements, as it does as DDP."""
    empty = [shape for shape in scenario.model.shapes or () if 0 in shape]
    if scenario.reload is not None and len(empty) > 1:
        yield Problem(
            path="model.shapes",
            message="accelerate 1.15.0 saves the first alone of params without elements, and "
            f"cannot load them, expected one at most with [reload], got {len(empty)}. {UPSTREAM}",
            suggestion="Leave out all but one.",
        )


def known_to_go_wrong(scenario: Scenario, options: Mapping[str, Any]) -> Iterator[Problem]:
    """Cases that accelerate 1.15.0 raises at.

    Args:
        scenario: As the target is given it.
        options: The value of each option.
    """
    if options["loaded_by_first"] and scenario.model.name != "mlp":
        yield Problem(
            path="system.options",
            message="accelerate 1.15.0 raises where the first rank loads params that the model "
            f"itself has, got loaded_by_first and model.name = {scenario.model.name!r}. "
            f"{UPSTREAM}",
            suggestion="Try the model mlp.",
        )
    if scenario.optimizer.name == "adagrad" and scenario.reload is not None:
        yield Problem(
            path="optimizer.name",
            message="accelerate 1.15.0 cannot save an optimizer that has state before its first "
            f"step, got 'adagrad' with [reload]. {UPSTREAM}",
            suggestion="Try another one.",
        )
    has_state = scenario.optimizer.name != "sgd" or scenario.optimizer.momentum
    if scenario.reload is not None and scenario.reload.form == "consolidated" and not has_state:
        yield Problem(
            path="reload.form",
            message="torch 2.13 raises 'Expected device to be set' where accelerate has it load a "
            "whole state of an optimizer that has no tensors in it, got SGD without momentum. "
            f"{UPSTREAM}",
            suggestion="Try form = 'sharded', or another optimizer.",
        )
    if options["wrap"] == "size" and scenario.model.tied:
        yield Problem(
            path="model.tied",
            message="accelerate 1.15.0 wraps by size what shares a param with another module, "
            "which torch 2.13 refuses in the first forward, got "
            f"{', '.join(map(repr, scenario.model.tied))}. {UPSTREAM}",
            suggestion="Try option wrap=none.",
        )
    if options["checkpointing"] and options["wrap"] == "none":
        yield Problem(
            path="system.options",
            message="accelerate 1.15.0 raises where it checkpoints activations and wraps no "
            f"children. {UPSTREAM}",
            suggestion="Try option wrap=size.",
        )


def as_reduced(scenario: Scenario) -> Scenario:
    """The case with one rank by itself reducing once a step, whatever it says."""
    if scenario.world.size > 1:
        return scenario
    return replace(scenario, system=replace(scenario.system, sync="last"))


def as_fsdp2(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that rules of FSDP2 ask for; those that accelerate has not as torch has them."""
    return {
        "reduce_dtype": options["reduce_dtype"],
        "all_reduce_last": False,
        "divide_factor": 0.0,
        "force_sum": False,
    }
