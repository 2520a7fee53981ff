"""Records of a bundle, and its id."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy
import torch

import zero_sim
from zero_sim.findings.records import BufferMap, Finding, Verdict
from zero_sim.host.device import device_in_words
from zero_sim.scenario.dump import to_chosen_data
from zero_sim.scenario.spec import Scenario
from zero_sim.sim import EventLog

FORMAT = "zero_sim bundle"
VERSION = 1
# 48 bits of the hash: short enough to type, long enough for all failures in a folder.
ID_CHARS = 12

BUNDLE_FILE = "bundle.json"
CASE_FILE = "case.toml"
TURNS_FILE = "turns.json"
EVENTS_FILE = "events.jsonl"
TENSORS_FILE = "tensors.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Facts about machine and versions on which a run's bits may depend."""

    zero_sim: str
    torch: str
    python: str
    numpy: str
    platform: str
    cpu_capability: str
    """Vector instructions in torch's kernels."""
    threads: int
    """torch's compute threads outside of cases. Cases always use a single thread."""
    device: str = ""
    """Device of ranks and reference, with its model; "" for the CPU."""

    def differences(self, here: Environment) -> Iterator[str]:
        """Yield a line for each difference from the environment here."""
        for column in dataclasses.fields(self):
            then, now = getattr(self, column.name), getattr(here, column.name)
            if then != now:
                yield f"{column.name}: {then or 'none'} in the bundle, {now or 'none'} here"


def current_environment(device: str = "cpu") -> Environment:
    """Return the environment of this process."""
    return Environment(
        zero_sim=zero_sim.__version__,
        # Convert to str, because TorchVersion compares as a version, not as text.
        torch=str(torch.__version__),
        python=platform.python_version(),
        numpy=numpy.__version__,
        platform=platform.platform(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        device=device_in_words(device),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """Settings of a run outside its scenario."""

    target: str = ""
    """`module:name` of an imported target; "" if the scenario names a registered target."""
    device: str = "cpu"
    """Device of ranks and reference."""
    backend: Literal["sim", "gloo", "nccl"] = "sim"

    @property
    def device_named(self) -> str:
        """Value of --device in commands."""
        # On real processes, the backend implies the device.
        return self.device if self.backend == "sim" else "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """A failed case with all its records."""

    id: str
    scenario: Scenario
    verdict: Verdict
    findings: tuple[Finding, ...]
    """At least one finding, with evidence if available."""
    notes: tuple[str, ...]
    environment: Environment
    logs: tuple[EventLog, ...]
    """Event log of each world in the case."""
    strip: BufferMap | None = None
    """Map of the flat buffer with the first finding in any buffer; None if no finding is in one."""
    ran: Ran = Ran()
    written: str = ""
    """Day of writing, such as `2026-07-31`; "" in older bundles."""


def bundle_id(scenario: Scenario, finding: Finding, *, ran: Ran | None = None) -> str:
    """Return the id of a failure: 12 hex digits, a hash of the case and the first finding.

    Args:
        scenario: The failed case.
        finding: The first finding.
        ran: Settings of the run; None for the simulated world on the CPU.
    """
    ran = ran or Ran()
    # Without names, so that a failure has the same id in every scenario file.
    anonymous = dataclasses.replace(scenario, name="", description="")
    facts: list[object] = [to_chosen_data(anonymous), finding.identity]
    # Without defaults, so that ids do not change when a setting is added.
    if ran.target:
        facts.append(ran.target)
    if (ran.device, ran.backend) != ("cpu", "sim"):
        facts.append({"device": ran.device, "backend": ran.backend})
    # Sorted, so that ids do not depend on the order of fields in the code.
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:ID_CHARS]
