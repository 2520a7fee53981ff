"""DeepSpeed's universal checkpoints: what its script makes of one, and what goes wrong with that.

[Note: what a universal checkpoint has]
A folder for each param with its fp32 master, `exp_avg` and `exp_avg_sq`, whole, and one file with
the settings of the optimizer, from which any number of ranks load. The script looks for these two
states and for no others.
"""

from __future__ import annotations

import contextlib
import io
import math
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from zero_sim.errors import Problem
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.declared import UPSTREAM
from zero_sim.targets.torch.optim import group_index
from zero_sim.workloads import params_of

_ADAMS = ("adamw", "adam", "radam")
"""Optimizers whose state is exp_avg and exp_avg_sq."""
_ALIGNED = 2
"""What stages 1 and 2 round a rank's part of a group up to."""


def convert(saved: Path, universal: Path) -> None:
    """Make a universal checkpoint of one that all ranks have saved; one rank calls it.

    Args:
        saved: Its folder, with the tag.
        universal: The folder that is made.
    """
    from deepspeed.checkpoint import ds_to_universal  # pyrefly: ignore

    asked = Namespace(
        input_folder=str(saved),
        output_folder=str(universal),
        # In this process.
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        # Engines of Megatron-DeepSpeed and AutoTP write it; the script has this for all others.
        inject_missing_state=True,
    )
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        ds_to_universal.main(asked)


def why_not_universal(scenario: Scenario) -> Iterator[Problem]:
    """What of a case its universal checkpoints are not made for."""
    if scenario.reload is None:
        return
    if scenario.optimizer.name not in _ADAMS:
        yield Problem(
            path="optimizer.name",
            message="DeepSpeed's universal checkpoints are made of exp_avg and exp_avg_sq, "
            f"expected one of {', '.join(_ADAMS)}, got {scenario.optimizer.name!r}.",
            suggestion="Try adamw.",
        )
    if scenario.reload.weights_only:
        yield Problem(
            path="reload.weights_only",
            message="DeepSpeed loads the optimizer's state from a universal checkpoint, whatever "
            "it is told.",
            suggestion="Leave it out.",
        )


def universal_goes_wrong(scenario: Scenario, *, stage: int) -> Iterator[Problem]:
    """Cases with universal checkpoints that are known to go wrong at a stage."""
    spec, reload = scenario.optimizer, scenario.reload
    if reload is None:
        return
    if spec.amsgrad:
        yield Problem(
            path="optimizer.amsgrad",
            message="DeepSpeed 0.19.8 leaves max_exp_avg_sq out of universal checkpoints. "
            f"{UPSTREAM}",
            suggestion="Leave it out.",
        )
    ranks = reload.world_size or scenario.world.size
    elems = _elems_of_groups(scenario)
    if stage == 3 and len(elems) > 1:
        yield Problem(
            path="optimizer.groups",
            message="DeepSpeed 0.19.8 gives all param groups the settings of the first one, and "
            f"one counter of steps, where stage 3 loads a universal checkpoint. {UPSTREAM}",
            suggestion="Leave them out, or try stage 2.",
        )
    if stage == 3 and _may_be_before_all_steps(scenario, step=reload.step):
        yield Problem(
            path="reload.step",
            message="DeepSpeed 0.19.8 raises where it makes a universal checkpoint of stage 3 that "
            "no step came before but skipped ones, which in fp16 any can be. "
            f"{UPSTREAM}",
            suggestion="Try more steps before it, or bf16.",
        )
    few = min(elems.values())
    if stage < 3 and _has_none(few, ranks=ranks):
        yield Problem(
            path="reload.world_size",
            message="DeepSpeed 0.19.8 raises where a rank that loads a universal checkpoint has no "
            f"part of a param group, expected fewer than {ranks} ranks for one of {few} elements. "
            f"{UPSTREAM}",
            suggestion="Try fewer ranks or larger params.",
        )


def _may_be_before_all_steps(scenario: Scenario, *, step: int) -> bool:
    """Whether all steps before one may be skipped."""
    nan = scenario.data.nan
    return scenario.model.dtype == "fp16" or (nan is not None and nan.step == 0 and step == 1)


def _elems_of_groups(scenario: Scenario) -> dict[int, int]:
    """Elements of each param group that has any params."""
    elems: dict[int, int] = {}
    for name, shape in params_of(scenario.model):
        index = group_index(scenario.optimizer, name)
        elems[index] = elems.get(index, 0) + math.prod(shape)
    return elems


def _has_none(elems: int, *, ranks: int) -> bool:
    """Whether the last rank's part of so many elements is padding alone."""
    part = -(-elems // (_ALIGNED * ranks)) * _ALIGNED
    return (ranks - 1) * part >= elems
