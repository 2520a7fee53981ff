"""zero_sim judges the optimizer over 50 drawn cases, bit for bit: the target is the ten lines."""

from my_optimizer import ShardedAdamW

from zero_sim.testing import conformance


class MyEngine:
    def __init__(self, module, scenario, group):
        self.module, self.named = module, dict(module.named_parameters())
        self.optimizer = ShardedAdamW(
            self.named.values(),
            group=group,
            lr=scenario.optimizer.lr,
            weight_decay=scenario.optimizer.weight_decay,
        )

    def zero_grad(self):
        self.module.zero_grad()

    def backward(self, loss, *, last_micro, rows):
        loss.backward()

    def step(self, *, lr_factor):
        self.optimizer.step()

    def params(self):
        return self.named


class MyTarget:
    name = "my-optimizer"

    def build(self, module, *, scenario, group):
        return MyEngine(module, scenario, group)


test_mine = conformance(MyTarget(), cases=50)
