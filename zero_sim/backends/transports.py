"""The transports there are, by name, one of each in a process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from zero_sim.backends.cuda import Cuda
from zero_sim.backends.gloo import Gloo
from zero_sim.backends.nccl import Nccl
from zero_sim.backends.transport import Transport
from zero_sim.errors import EnvironmentProblem

_MAKERS: dict[str, Callable[[], Transport]] = {"gloo": Gloo, "nccl": lambda: Nccl(Cuda())}
_MADE: dict[str, Transport] = {}


def find_transport(name: str) -> Transport:
    """The transport of this process by name, always the same one.

    Raises:
        EnvironmentProblem: There is none of that name.
    """
    if name not in _MAKERS:
        raise EnvironmentProblem(
            f"expected a backend that is one of {', '.join(_MAKERS)}, got {name!r}. "
            "Try `zero-sim doctor`."
        )
    if name not in _MADE:
        _MADE[name] = _MAKERS[name]()
    return _MADE[name]


def put_transport(name: str, make: Callable[[], Transport]) -> None:
    """Put another transport in the place of one, such as a stand-in; in this process alone."""
    _MAKERS[name] = make
    _MADE.pop(name, None)


def local_rank_of(environment: Mapping[str, str] = os.environ, *, rank: int) -> int:
    """Which process of its machine this one is, as a launcher says; else its rank."""
    return int(environment.get("LOCAL_RANK", rank))
