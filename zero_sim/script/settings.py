"""The world that a script runs on, and who looks on from inside."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from zero_sim.sim.call import Call
from zero_sim.sim.log import CollectiveRecord

KEEP_A_RANK = ("accelerate", "hydra")
"""Packages that keep the process's rank or settings in globals, so each rank has its own."""

SINGLETONS = (
    "accelerate.state:AcceleratorState._shared_state",
    "accelerate.state:GradientState._shared_state",
    "accelerate.state:PartialState._shared_state",
    "fairscale.internal.parallel:get_process_group_cached._global_group_cache",
    "fairscale.nn.model_parallel.initialize:*",
    "hydra.core.singleton:Singleton._instances",
)
"""Names under which packages keep it, for ranks that share the packages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Everything about the world that a script runs on."""

    ranks_per_node: int
    nodes: int = 1
    order: str = "linear"
    schedule: str = "round-robin"
    timing: str = "eager"
    depth: int = 3
    races: bool = False
    strict: bool = True
    stall_seconds: float = 300.0
    packages: tuple[str, ...] = ()
    """Top-level packages that every rank imports for itself, besides the script's folder and
    `KEEP_A_RANK`."""
    cuda_is_cpu: bool = False
    gpus_per_node: int | None = None
    """GPUs that scripts find with `cuda_is_cpu`; None for one a rank."""
    kernels_are_stubs: bool = False
    """True if packages of kernels that are not installed are stubs."""
    starter: Literal["", "visible", "all"] = ""
    """Empty for a script whose ranks torchrun starts. Of a script that starts its own: which of its
    processes are ranks, those that visibly join a group or all that run a function of its own."""
    address: str = "localhost"
    port: int = 29500
    shown: frozenset[int] | None = None
    """Ranks whose output is shown; None for all."""

    @property
    def world_size(self) -> int:
        """Number of ranks of all nodes."""
        return self.ranks_per_node * self.nodes

    @property
    def own_packages(self) -> tuple[str, ...]:
        """Packages that every rank imports for itself."""
        return (*KEEP_A_RANK, *self.packages)

    def of_world(self) -> dict[str, Any]:
        """Arguments of `World`, apart from its size and seed."""
        return {
            "order": self.order,
            "schedule": self.schedule,
            "timing": self.timing,
            "depth": self.depth,
            "races": self.races,
            "strict": self.strict,
            "stall_seconds": self.stall_seconds,
            "initialized": False,
        }

    def options(self, *, seed: int) -> list[str]:
        """Options of `zero-sim torchrun` for such a world, apart from its size."""
        flags = (
            ("--races", self.races),
            ("--no-strict", not self.strict),
            ("--cuda-is-cpu", self.cuda_is_cpu),
        )
        values = {
            "--order": self.order,
            "--schedule": self.schedule,
            "--timing": self.timing,
            "--stall-seconds": self.stall_seconds,
            "--seed": seed,
        }
        words = [word for name, value in values.items() for word in (name, str(value))]
        return [*(flag for flag, given in flags if given), *words]

    def environment(self, rank: int) -> Mapping[str, str]:
        """What torchrun puts into the environment of a rank."""
        node, local_rank = divmod(rank, self.ranks_per_node)
        facts = {
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "GROUP_RANK": node,
            "ROLE_RANK": rank,
            "ROLE_NAME": "default",
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.ranks_per_node,
            "GROUP_WORLD_SIZE": self.nodes,
            "ROLE_WORLD_SIZE": self.world_size,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
            "OMP_NUM_THREADS": 1,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        return {name: str(value) for name, value in facts.items()}


class Guest(Protocol):
    """Looks on at the ranks of a script from inside."""

    @property
    def needs_all_ranks(self) -> bool:
        """True if a script whose ranks are in other processes is to be refused."""
        ...

    def in_rank(self, rank: int) -> AbstractContextManager[object]:
        """A context around one rank's program, entered in its thread."""
        ...

    def in_starter(self) -> AbstractContextManager[object]:
        """A context around the main part of a script that starts its ranks, in its thread."""
        ...

    def called(self, record: CollectiveRecord, call: Call) -> None:
        """Receive each call of a collective, in the thread of its rank."""
        ...


class NoGuest:
    """Leaves ranks alone."""

    needs_all_ranks = False

    def in_rank(self, rank: int) -> AbstractContextManager[object]:
        """Nothing around the program."""
        return contextlib.nullcontext()

    def in_starter(self) -> AbstractContextManager[object]:
        """Nothing around the main part."""
        return contextlib.nullcontext()

    def called(self, record: CollectiveRecord, call: Call) -> None:
        """Nothing to do."""
