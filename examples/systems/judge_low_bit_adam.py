"""Judges low_bit_adam.py: bf16 params without masters, 8-bit moments, owners."""

from low_bit_adam import LowBitAdam, OwnerSharded

from zero_sim.targets import ADAMW_SETTINGS, Capabilities, Numerics, OwnedPart, Place, flat_state


class Engine:
    def __init__(self, module, spec):
        self.module, self.named, self.lr = module, dict(module.named_parameters()), spec.lr
        self.own = OwnerSharded(self.named.values(), LowBitAdam, **settings(spec))

    def zero_grad(self):
        self.module.zero_grad()

    def backward(self, loss, *, last_micro, rows):
        loss.backward()

    def step(self, *, lr_factor):
        self.own.set_lr(self.lr * lr_factor)
        self.own.step()

    def params(self):
        return self.named

    def parts(self):
        for name, param in list(self.named.items())[self.own.rank :: self.own.world]:
            yield OwnedPart(
                place=Place(param=name, start=0, stop=param.numel()),
                grad=None if param.grad is None else param.grad.view(-1),
                master=param.detach().view(-1),
                state=flat_state(self.own.optimizer.state.get(param, {})),
            )


class Target:
    name = "low-bit-adam"
    follows = (*ADAMW_SETTINGS, "optimizer.warmup_steps", "run.micro_batches")
    capabilities = Capabilities(stages=(1,), dtypes=("bf16", "fp32"), follows=follows)
    numerics = Numerics(
        divide="pre", reported_grads="after-division", masters="param", reported_dtype="param"
    )

    def reference_optimizer(self, named, scenario):
        return LowBitAdam(named.values(), **settings(scenario.optimizer))

    def build(self, module, *, scenario, group):
        return Engine(module, scenario.optimizer)


def settings(spec):
    return {name: getattr(spec, name) for name in ("lr", "betas", "eps", "weight_decay")}
