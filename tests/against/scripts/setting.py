"""Arguments of the scripts, `key=value` each, and optimizers by name."""

import sys
from types import SimpleNamespace

import torch


class Lion(torch.optim.Optimizer):
    """Steps of equal size in the direction of a moving average."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.sub_(average.lerp(p.grad, 0.1).sign(), alpha=group["lr"])
                average.lerp_(p.grad, 0.01)


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "lion": lambda params: Lion(params, lr=1e-3),
}


def setting(**defaults):
    """Return the arguments, each with its default's type. `fault` names a planted fault, or is
    empty.
    """
    given = dict(word.split("=") for word in sys.argv[1:])
    unknown = given.keys() - defaults.keys() - {"fault"}
    assert not unknown, unknown
    found = {key: type(value)(given.get(key, value)) for key, value in defaults.items()}
    if "dtype" in found:
        found["dtype"] = getattr(torch, found["dtype"])
    return SimpleNamespace(**found, fault=given.get("fault", ""))
