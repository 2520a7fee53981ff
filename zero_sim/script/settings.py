"""Settings of a script's world, and the protocol of observers in its ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from zero_sim.sim.call import Call
from zero_sim.sim.log import CollectiveRecord

# If these were shared, all ranks would see the first rank's values.
KEEP_A_RANK = ("accelerate", "hydra")
"""Packages with the rank or settings in globals. Each rank imports its own copy."""

SINGLETONS = (
    "accelerate.state:AcceleratorState._shared_state",
    "accelerate.state:GradientState._shared_state",
    "accelerate.state:PartialState._shared_state",
    "fairscale.internal.parallel:get_process_group_cached._global_group_cache",
    "fairscale.nn.model_parallel.initialize:*",
    "hydra.core.singleton:Singleton._instances",
)
"""Globals with rank state in packages that ranks share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of a script's simulated world."""

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
    """Top-level packages that each rank imports itself, besides modules in the script's folder and
    `KEEP_A_RANK`.
    """
    cuda_is_cpu: bool = False
    gpus_per_node: int | None = None
    """Number of GPUs per node with `cuda_is_cpu`; None for a GPU per rank."""
    kernels_are_stubs: bool = False
    """True to replace missing kernel packages by stubs."""
    starter: Literal["", "visible", "all"] = ""
    """Empty if torchrun starts the ranks. If the script starts its ranks: "visible" if processes
    whose function mentions a joining call are ranks, "all" if all processes with its functions are.
    """
    address: str = "localhost"
    port: int = 29500
    shown: frozenset[int] | None = None
    """Ranks whose output is shown; None for all ranks."""

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes."""
        return self.ranks_per_node * self.nodes

    @property
    def own_packages(self) -> tuple[str, ...]:
        """All packages that each rank imports itself."""
        return (*KEEP_A_RANK, *self.packages)

    def of_world(self) -> dict[str, Any]:
        """Return arguments for `World`, except size and seed."""
        return {
            "order": self.order,
            "schedule": self.schedule,
            "timing": self.timing,
            "depth": self.depth,
            "races": self.races,
            "strict": self.strict,
            "stall_seconds": self.stall_seconds,
            # The script calls init_process_group itself.
            "initialized": False,
        }

    def options(self, *, seed: int) -> list[str]:
        """Return `zero-sim torchrun` options for the same world, except its size."""
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
        """Return the variables that torchrun sets for a rank."""
        # Like torchrun, number the ranks node by node.
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
            # torchrun's default if several ranks share a machine.
            "OMP_NUM_THREADS": 1,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        return {name: str(value) for name, value in facts.items()}


class Guest(Protocol):
    """Observer inside a script's ranks."""

    @property
    def needs_all_ranks(self) -> bool:
        """True to refuse scripts whose ranks run in other processes."""
        ...

    def in_rank(self, rank: int) -> AbstractContextManager[object]:
        """Return a context for a rank's program, entered in the rank's thread."""
        ...

    def in_starter(self) -> AbstractContextManager[object]:
        """Return a context for a script's main part, if the script starts its ranks."""
        ...

    def called(self, record: CollectiveRecord, call: Call) -> None:
        """Receive a collective call, in the rank's thread."""
        ...


class NoGuest:
    """Observer that does nothing."""

    needs_all_ranks = False

    def in_rank(self, rank: int) -> AbstractContextManager[object]:
        """Return an empty context."""
        return contextlib.nullcontext()

    def in_starter(self) -> AbstractContextManager[object]:
        """Return an empty context."""
        return contextlib.nullcontext()

    def called(self, record: CollectiveRecord, call: Call) -> None:
        """Do nothing."""
