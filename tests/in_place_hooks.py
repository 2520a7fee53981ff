"""Target whose hooks change gradients in place during backward."""

import torch.distributed as dist

from zero_sim.targets import Capabilities, Numerics, WholeParamEngine, plain_optimizer


class InPlaceHooks:
    """Engine that averages gradients in tensor hooks, in autograd's own memory."""

    name = "in-place-hooks"
    capabilities = Capabilities(stages=(0,))
    numerics = Numerics(reported_grads="after-division", divide="pre")

    def build(self, module, *, scenario, group):
        named = dict(module.named_parameters())

        def average(grad):
            grad.div_(group.size())
            dist.all_reduce(grad, group=group)

        for param in named.values():
            param.register_hook(average)
        engine = WholeParamEngine(module, plain_optimizer(scenario.optimizer, named), group=group)
        engine.reduce = lambda: None
        return engine
