"""The record that a bundle is, and the id that names it."""

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
ID_CHARS = 12

BUNDLE_FILE = "bundle.json"
CASE_FILE = "case.toml"
TURNS_FILE = "turns.json"
EVENTS_FILE = "events.jsonl"
TENSORS_FILE = "tensors.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """What a case ran on, as far as its bits may depend on it."""

    zero_sim: str
    torch: str
    python: str
    numpy: str
    platform: str
    cpu_capability: str
    """Vector instructions that torch's kernels use."""
    threads: int
    """Compute threads of torch outside of cases, within which it is always one."""
    device: str = ""
    """What ranks and reference computed on, with its kind; empty for the CPU."""

    def differences(self, here: Environment) -> Iterator[str]:
        """What differs here, one line each."""
        for column in dataclasses.fields(self):
            then, now = getattr(self, column.name), getattr(here, column.name)
            if then != now:
                yield f"{column.name}: {then or 'none'} in the bundle, {now or 'none'} here"


def current_environment(device: str = "cpu") -> Environment:
    """The environment of this process.

    Args:
        device: What cases compute on.
    """
    return Environment(
        zero_sim=zero_sim.__version__,
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
    """How a case was run, as far as its scenario does not say it."""

    target: str = ""
    """`module:name` of the system under test where it was imported; empty where the scenario names
    it."""
    device: str = "cpu"
    """Where ranks and reference computed."""
    backend: Literal["sim", "gloo", "nccl"] = "sim"
    """What carried the collectives. Real ones record no events."""

    @property
    def device_named(self) -> str:
        """The device, where commands name one: for real processes their backend decides."""
        return self.device if self.backend == "sim" else "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """A failed case, complete."""

    id: str
    scenario: Scenario
    verdict: Verdict
    findings: tuple[Finding, ...]
    """At least one; evidence is attached where there is any."""
    notes: tuple[str, ...]
    environment: Environment
    logs: tuple[EventLog, ...]
    """The event log of each world that the case ran in."""
    strip: BufferMap | None = None
    """The flat buffer of the first finding that lies in one."""
    ran: Ran = Ran()
    written: str = ""
    """The day on which it was written, such as `2026-07-31`; empty where it does not say."""


def bundle_id(scenario: Scenario, finding: Finding, *, ran: Ran | None = None) -> str:
    """The id of a failure: 12 hex digits over what the case is and what was found first.

    What the case is called does not count: the same failure has the same id wherever it is found.

    Args:
        scenario: The case that failed.
        finding: Its first one.
        ran: How it was run; left out for the CPU, in the simulated world.
    """
    ran = ran or Ran()
    anonymous = dataclasses.replace(scenario, name="", description="")
    facts: list[object] = [to_chosen_data(anonymous), finding.identity]
    if ran.target:
        facts.append(ran.target)
    if (ran.device, ran.backend) != ("cpu", "sim"):
        facts.append({"device": ran.device, "backend": ran.backend})
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:ID_CHARS]
