"""Judges flat_adamw.py: equal shards of a flat buffer, AdamW by mul and add, clipping."""

from flat_adamw import FlatAdamW, adamw_

from zero_sim.targets import ADAMW_SETTINGS, Capabilities, Numerics, StepResult, flat_parts

SETTINGS = ("lr", "betas", "eps", "weight_decay")
ALSO = (
    "optimizer.clip_norm",
    "optimizer.warmup_steps",
    "run.micro_batches",
    "model.unused",
    "model.one_rank",
)


class Engine:
    def __init__(self, module, spec):
        self.module, self.named, self.lr = module, dict(module.named_parameters()), spec.lr
        settings = {name: getattr(spec, name) for name in (*SETTINGS, "clip_norm")}
        self.own = FlatAdamW(self.named.values(), buffers=module.buffers(), **settings)
        self.zero_grad = self.own.zero_grad

    def backward(self, loss, *, last_micro, rows):
        loss.backward()

    def step(self, *, lr_factor):
        self.own.lr = self.lr * lr_factor
        return StepResult(norm=self.own.step())

    def params(self):
        return self.named

    def parts(self):
        live = {name: getattr(self.own, name) for name in ("first", "master", "grad", "state")}
        return flat_parts(self.named, **live)


class Target:
    name = "flat-adamw"
    follows = (*ADAMW_SETTINGS, *ALSO, "model.distinct_start")
    capabilities = Capabilities(stages=(1,), dtypes=("fp32", "bf16"), follows=follows)
    numerics = Numerics(
        accumulate_dtype="param", reduce_dtype="fp32", norm="of-shards", clip="fp32-reciprocal",
        reported_grads="after-clip", reported_dtype="fp32", elementwise=True,
    )  # fmt: skip

    def reference_step(self, param, grad, state, settings):
        adamw_(param, grad, state, **{name: settings[name] for name in SETTINGS})

    def build(self, module, *, scenario, group):
        return Engine(module, scenario.optimizer)
