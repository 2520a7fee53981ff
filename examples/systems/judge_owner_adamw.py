"""Judges owner_adamw.py: params with owners, AdamW with arithmetic of its own."""

from owner_adamw import AdamW, DataParallel, ShardedOptimizer

from zero_sim.targets import ADAMW_SETTINGS, Capabilities, Numerics, WholeParamEngine, param_groups


def settings(spec):
    return {name: getattr(spec, name) for name in ("lr", "betas", "eps", "weight_decay")}


class Engine(WholeParamEngine):
    def backward(self, loss, *, last_micro, rows):
        self.module.sync = last_micro
        loss.backward()

    def reduce(self):
        self.module.wait_for_gradients()

    def share(self):
        """The optimizer broadcasts in its step."""

    def state_of(self, param):
        return self.optimizer.local.state[param]


class Target:
    name = "owner-adamw"
    follows = (*ADAMW_SETTINGS, "optimizer.groups", "optimizer.warmup_steps", "run.micro_batches")
    capabilities = Capabilities(
        stages=(1,), follows=(*follows, "model.distinct_start", "model.tied")
    )
    numerics = Numerics(divide="pre", reported_grads="after-division", elementwise=True)

    def reference_optimizer(self, named, scenario):
        return AdamW(param_groups(scenario.optimizer, named), **settings(scenario.optimizer))

    def build(self, module, *, scenario, group):
        spec, named, wrapped = (
            scenario.optimizer,
            dict(module.named_parameters()),
            DataParallel(module),
        )
        optimizer = ShardedOptimizer(param_groups(spec, named), AdamW, **settings(spec))
        engine = Engine(
            module, optimizer, group=group, owner_of=lambda name: optimizer.owner[named[name]]
        )
        engine.module = wrapped
        return engine
