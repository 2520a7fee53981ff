"""Library that assumes one rank per process, and targets around it."""

import sys

from torch import nn

from zero_sim.targets import Capabilities, Numerics, RankLocal
from zero_sim.targets.torch.ddp import DDPEngine

LIBRARY = """
import torch.distributed as dist

GROUP = None
SEEN = []

class Engine:
    built = 0

    def register(self, count=[0]):
        count[0] += 1
        return count[0]

def group():
    global GROUP
    if GROUP is None:
        GROUP = dist.new_group(list(range(dist.get_world_size())))
    return GROUP
"""
NAMES = (
    "keeper_lib:Engine.built",
    "keeper_lib:Engine.register(count)",
    "keeper_lib:GROUP",
    "keeper_lib:SEEN",
)


class KeeperEngine(DDPEngine):
    """DDP over a group that the library keeps in a global."""

    def __init__(self, module: nn.Module, *, scenario, group) -> None:
        library = sys.modules.get("keeper_lib") or __import__("keeper_lib")
        super().__init__(module, scenario=scenario, group=library.group())
        library.Engine.built += 1
        library.SEEN.append(group.rank())
        counted = (library.Engine.built, library.Engine().register(), library.SEEN)
        if counted != (1, 1, [group.rank()]):
            raise RuntimeError(f"rank {group.rank()} is not alone in its process: {counted}")


class Keeper:
    """Target as a user of the library would write it."""

    name = "keeper"
    capabilities = Capabilities(stages=(0,))
    numerics = Numerics(divide="premul")

    def __init__(self, rank_local: RankLocal | None = None) -> None:
        self.rank_local = rank_local

    def build(self, module, *, scenario, group):
        return KeeperEngine(module, scenario=scenario, group=group)
