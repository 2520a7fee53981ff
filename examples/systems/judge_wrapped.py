"""zero_sim judges per-module wrappers with plain optimizers of torch over the shards."""

from wrapped import Sharded, wrap

from zero_sim import targets


class Engine:
    def __init__(self, module, scenario, group):
        self.module, self.rank = wrap(module, group), group.rank()
        self.units = [unit for unit in self.module.modules() if isinstance(unit, Sharded)]
        shards = {unit.prefix: unit.shard for unit in self.units}
        self.optimizer = targets.plain_optimizer(scenario.optimizer, shards)
        self.zero_grad = self.optimizer.zero_grad

    def backward(self, loss, *, last_micro, rows):
        loss.backward()

    def step(self, *, lr_factor):
        self.optimizer.step()

    def params(self):
        return {name: param for unit in self.units for name, param in unit.whole().items()}

    def parts(self):
        for index, unit in enumerate(self.units):
            first, state = self.rank * len(unit.shard), self.optimizer.state[unit.shard]
            at = {"first": first, "buffer": index, "master": unit.shard, "grad": unit.shard.grad}
            yield from targets.flat_parts(unit.whole(), state=state, **at)


class Target:
    name, follows = "wrapped", (*targets.ADAMW_SETTINGS, "run.micro_batches")
    untied = tuple(model for model in targets.PLAIN_MODELS if model != "gpt")
    capabilities = targets.Capabilities(models=untied, stages=(3,), follows=follows)
    numerics = targets.Numerics(divide="pre", sync="every", reported_grads="after-division")

    def build(self, module, *, scenario, group):
        return Engine(module, scenario, group)
