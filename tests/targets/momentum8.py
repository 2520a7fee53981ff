"""SGD with 8-bit momentum for large params: large as a whole, or in the local part."""

import torch
import torch.distributed as dist

from zero_sim.targets import Capabilities, Numerics, OwnedPart, Place, StepResult

INDEPENDENT = ("world.size", "system.stage")


class Fixed:
    """Quantization decided by the size of the whole param."""

    name = "momentum8"
    capabilities = Capabilities(optimizers=("own",), independent_of=INDEPENDENT)
    numerics = Numerics(divide="post")
    engine_class = property(lambda self: Engine)
    sums = 1

    def build(self, module, *, scenario, group):
        return self.engine_class(self, module, scenario, group)

    @staticmethod
    def size(param, local):
        return param.numel()


class Faulty(Fixed):
    """Quantization decided by the size of the rank's part."""

    @staticmethod
    def size(param, local):
        return local.numel()


class WithoutParts(Faulty):
    """An engine that reports params only."""

    engine_class = property(lambda self: ParamsEngine)


class ParamsEngine:
    def __init__(self, target, module, scenario, group):
        self.module, self.group, self.target = module, group, target
        self.lr = scenario.optimizer.lr
        self.named = dict(module.named_parameters())
        self.spans = {}
        for name, param in self.named.items():
            elems = param.numel()
            cut = -(-elems // group.size()) if scenario.system.stage else elems
            start = min(elems, group.rank() * cut if scenario.system.stage else 0)
            self.spans[name] = (start, min(elems, start + cut))
        self.is_cut = scenario.system.stage > 0
        self.grads = {}
        self.momentum = {name: self.local(name, p).zero_() for name, p in self.named.items()}

    def local(self, name, whole):
        start, stop = self.spans[name]
        return whole.detach().reshape(-1)[start:stop].clone()

    def zero_grad(self):
        self.module.zero_grad()

    def backward(self, loss, *, last_micro, rows):
        loss.backward()

    @torch.no_grad()
    def step(self, *, lr_factor):
        for name, param in self.named.items():
            for _ in range(self.target.sums):
                dist.all_reduce(param.grad, group=self.group)
            self.grads[name] = self.local(name, param.grad)
            momentum = self.momentum[name]
            momentum.mul_(0.9).add_(self.grads[name] / self.group.size())
            if self.target.size(param, momentum) >= 8:
                momentum.copy_((momentum * 16).round() / 16)
            start, stop = self.spans[name]
            param.view(-1)[start:stop].sub_(momentum, alpha=self.lr * lr_factor)
            if self.is_cut:
                self.gather(param, start, stop)
        return StepResult()

    def gather(self, param, start, stop):
        cut = -(-param.numel() // self.group.size())
        padded = param.new_zeros(cut)
        padded[: stop - start] = param.view(-1)[start:stop]
        pieces = [torch.empty_like(padded) for _ in range(self.group.size())]
        dist.all_gather(pieces, padded, group=self.group)
        param.view(-1).copy_(torch.cat(pieces)[: param.numel()])

    def params(self):
        return dict(self.named)


class Engine(ParamsEngine):
    def parts(self):
        for name, (start, stop) in self.spans.items():
            if start < stop:
                yield OwnedPart(
                    place=Place(param=name, start=start, stop=stop),
                    grad=self.grads.get(name),
                    master=self.named[name].detach().reshape(-1)[start:stop],
                    state={"momentum": self.momentum[name]},
                )
