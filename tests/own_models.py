"""A target's own model, and targets that train it."""

from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from zero_sim.targets import Capabilities, Numerics, OwnModel, WholeParamEngine, plain_optimizer


class TinyText(nn.Module):
    """A token model of torch layers, with a tied head, a layer used twice and dropout."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.layer = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.norm(self.tokens(tokens))
        for _ in range(2):
            x = x + self.dropout(torch.tanh(self.layer(x)))
        return self.head(x)


def draw_text(generator, rows):
    tokens = torch.randint(7, (rows, 4), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def text_loss(module, tokens, wanted):
    return functional.cross_entropy(module(tokens).flatten(0, 1).float(), wanted.flatten())


TINY = OwnModel(build=TinyText, batch=draw_text, loss=text_loss)


class ByTypeEngine(WholeParamEngine):
    """Engine that averages only the gradients of known layer types."""

    kinds = (nn.Embedding, nn.LayerNorm, nn.Linear)

    def reduce(self):
        for part in self.module.modules():
            for param in part.parameters(recurse=False):
                is_second = isinstance(part, nn.Linear) and part.bias is None
                if isinstance(part, self.kinds) and not is_second:
                    dist.all_reduce(param.grad, group=self.group)
                    param.grad /= self.group.size()


class OwnModelTarget:
    """Target that trains only its own model."""

    name = "own-model"
    models: ClassVar = {"tiny": TINY}
    capabilities = Capabilities(models=(), stages=(0,))
    numerics = Numerics(reported_grads="after-division")
    engine = ByTypeEngine

    def build(self, module, *, scenario, group):
        named = dict(module.named_parameters())
        return self.engine(module, plain_optimizer(scenario.optimizer, named), group=group)


class ForgetsNorms(OwnModelTarget):
    """Target that never reduces the gradients of `nn.LayerNorm`."""

    class engine(ByTypeEngine):
        kinds = (nn.Embedding, nn.Linear)
