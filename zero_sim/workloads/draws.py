"""Random numbers for workloads, from generators that are named by purpose."""
# torch's global generator is not used here, so a simulated rank, a real process and the reference
# draw the same data, in any order of calls.

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from zero_sim.scenario.spec import DtypeName, Scenario

_DTYPES: Final[Mapping[DtypeName, torch.dtype]] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def working_dtype(name: DtypeName) -> torch.dtype:
    """Return the torch dtype for a scenario's dtype name."""
    return _DTYPES[name]


def data_rank(scenario: Scenario, *, rank: int) -> int:
    """Return the rank whose data `rank` gets: itself, or 0 if all ranks share their data."""
    return 0 if scenario.data.ranks == "same" else rank


def seed_of(scenario: Scenario, *, step: int, rank: int, micro: int) -> int:
    """Return the seed for `torch.manual_seed` just before a micro-batch's forward."""
    # If ranks share rank 0's data, they share its seed too: their gradients must be equal.
    source = data_rank(scenario, rank=rank)
    return named_seed(scenario.run.seed, "forward", step, source, micro)


def batch_generator(scenario: Scenario, *, step: int, rank: int, micro: int) -> torch.Generator:
    """Return the generator for a micro-batch's data."""
    source = data_rank(scenario, rank=rank)
    return generator_of(named_seed(scenario.run.seed, "data", step, source, micro))


def weight_generator(scenario: Scenario) -> torch.Generator:
    """Return the generator for the initial weights, to draw in registration order."""
    return generator_of(named_seed(scenario.run.seed, "weights"))


def generator_of(seed: int) -> torch.Generator:
    """Return a fresh CPU generator with this seed."""
    return torch.Generator().manual_seed(seed)


def named_seed(seed: int, purpose: str, *indices: int) -> int:
    """Mix a run's seed, a purpose and indices into one 63-bit seed."""
    # torch's CPU generator keeps only the low 32 bits of a seed. Packing step, rank and micro-batch
    # into separate bits would lose some, whereas a hash spreads them all.
    text = f"{purpose}:{seed}:" + ",".join(map(str, indices))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def rows_of(scenario: Scenario, *, step: int, rank: int) -> int:
    """Return the rows in a micro-batch on `rank`: equal for all ranks, or up to two more.

    The last step in an epoch has half as many rows.
    """
    data = scenario.data
    is_last = data.epoch_steps is not None and (step + 1) % data.epoch_steps == 0
    rows = data.rows // 2 if is_last else data.rows
    # Uneven rows: 0, 1 or 2 more, by rank.
    return rows + (data_rank(scenario, rank=rank) % 3 if data.uneven_rows else 0)


def plant_nan(inputs: Tensor, *, scenario: Scenario, step: int, rank: int, micro: int) -> Tensor:
    """Write the scenario's NaN or infinity, if any, into an element, in place."""
    # Only on the scenario's rank, even if all ranks otherwise share rank 0's data.
    nan = scenario.data.nan
    if nan is None or (nan.step, nan.rank, nan.micro_batch) != (step, rank, micro):
        return inputs
    if elems := inputs.numel():
        # Modulo, so that the element exists in every batch.
        inputs.view(-1)[nan.element % elems] = math.inf if nan.value == "inf" else math.nan
    return inputs
