"""Protocols of NCCL: which of them a collective of a size gets round a ring, by NCCL's own model.

Source: NCCL's table of latencies (ncclTunerConstantsDefaults, src/graph/tuning.cc, 2.28) and its
model of a ring: a base latency, one for each step by its link, and the bytes over the bandwidth, of
which LL gets a half and LL128 0.92. Left out, so that real choices can differ: trees, channels,
caps of generations of GPUs, and the user's NCCL_PROTO.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from zero_sim.cost.network import Network, Route, messages

Protocol = Literal["LL", "LL128", "Simple"]

_BASE_US: Final[Mapping[Protocol, float]] = {"LL": 6.6, "LL128": 14.0, "Simple": 8.4}
_INSIDE_US: Final[Mapping[Protocol, float]] = {"LL": 0.6, "LL128": 1.9, "Simple": 3.4}
_BETWEEN_US: Final[Mapping[Protocol, float]] = {"LL": 2.7, "LL128": 4.0, "Simple": 14.0}
_BANDWIDTH: Final[Mapping[Protocol, float]] = {"LL": 0.5, "LL128": 0.92, "Simple": 1.0}


def microseconds(
    protocol: Protocol, kind: str, sent_bytes: float, route: Route, *, network: Network
) -> float:
    """How long a collective takes round a ring with one of the protocols.

    Args:
        protocol: Whose latencies and share of the bandwidth count.
        kind: Of the collective.
        sent_bytes: What a rank sends in all of it.
        route: Of its group.
        network: The links' bandwidths; latencies are NCCL's.
    """
    steps = messages(kind, route.size)
    crossing = steps * float(route.between)
    link = network.between if route.between else network.inside
    latency = _BASE_US[protocol] + (steps - crossing) * _INSIDE_US[protocol]
    latency += crossing * _BETWEEN_US[protocol]
    speed = link.gigabytes_per_second * 1e3 * _BANDWIDTH[protocol]
    return latency + sent_bytes / speed


def likely_protocol(kind: str, sent_bytes: float, route: Route, *, network: Network) -> Protocol:
    """The protocol that takes least; arguments as `microseconds`."""
    times = {
        name: microseconds(name, kind, sent_bytes, route, network=network) for name in _BASE_US
    }
    return min(times, key=lambda name: times[name])
