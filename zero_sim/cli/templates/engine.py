"""Your optimizer behind zero_sim's protocol: a ZeRO-1 system where each param has one owner.

Run it with
    pytest test_engine.py
    zero-sim run engine.toml --target engine:MyTarget
    zero-sim fuzz --target engine:MyTarget --cases 200
"""

import torch.distributed as dist

from zero_sim.targets import (
    ADAMW_SETTINGS,
    Capabilities,
    Numerics,
    WholeParamEngine,
    class_of,
    settings_of,
)


class MyEngine(WholeParamEngine):
    """The engine of a rank. Put your communication in `reduce` and `share`, which are judged.

    If you cut flat buffers into shards instead, start from `FlatShardEngine` and its `shard_of`,
    `reduce` and `gather`. An engine needs no base class: see docs/target-reference.md.
    """

    def reduce(self):
        """Turn each `.grad` into the mean over all ranks, at least on the param's owner."""
        for param in self.named.values():
            dist.all_reduce(param.grad, group=self.group)
            param.grad /= self.group.size()

    def share(self):
        """Send each updated param from its owner to all ranks."""
        for name, param in self.named.items():
            dist.broadcast(param.detach(), group_src=self.owner_of(name), group=self.group)


class MyTarget:
    """The system under test: `--target engine:MyTarget`."""

    name = "mine"

    # The fuzzer only draws cases within these. Widen them when your code supports more; see
    # docs/target-reference.md.
    capabilities = Capabilities(
        stages=(1,),  # (0,) if every rank steps all params.
        optimizers=(
            "adamw",
            "sgd",
        ),  # Keep sgd if you can: AdamW hides a gradient N times too large.
        follows=(*ADAMW_SETTINGS, "optimizer.warmup_steps", "run.micro_batches"),
    )

    # The arithmetic of your code. `zero-sim rules --target engine:MyTarget` finds this declaration.
    numerics = Numerics(reported_grads="after-division")

    def build(self, module, *, scenario, group):
        """Wrap a rank's module."""
        names = [name for name, _ in module.named_parameters()]
        owners = {name: index % group.size() for index, name in enumerate(names)}
        # Your optimizer class goes here. The reference steps with these settings, so use them.
        optimizer_class = class_of(scenario.optimizer)
        optimizer = optimizer_class(module.parameters(), **settings_of(scenario.optimizer))
        return MyEngine(module, optimizer, group=group, owner_of=owners.get)
