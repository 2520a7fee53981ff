"""Variables that decide the order in which NCCL adds: pinned values, and contradictions to them.

From NCCL's source (2.30). Its configuration files, `NCCL_CONF_FILE` or `~/.nccl.conf`, then
`/etc/nccl.conf`, only set variables that the environment lacks, so pins take precedence. Existing
files are shown. `NCCL_MIN_NCHANNELS` and its older names are not other spellings of
`NCCL_MIN_CTAS`. They count beside it, so they must have the same value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

from zero_sim.errors import EnvironmentProblem

BUFFER_BYTES = 4 << 20
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Variable that lets ranks share a GPU."""

PINS: Mapping[str, str] = {
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_MIN_CTAS": "1",
    "NCCL_MAX_CTAS": "1",
    "NCCL_BUFFSIZE": str(BUFFER_BYTES),
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_COLLNET_ENABLE": "0",
    "NCCL_PAT_ENABLE": "0",
    "NCCL_WIN_ENABLE": "0",
    "NCCL_TUNER_PLUGIN": "none",
}
"""Variables that make NCCL add in one ring on one channel, with chunks of half a buffer."""

TORCH_PINS: Mapping[str, str] = {
    # torch would end a process that hangs. The supervising process ends and reports it instead.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "0",
    # Cases contain non-finite gradients on purpose.
    "TORCH_NCCL_NAN_CHECK": "0",
}
"""Variables that keep torch from ending a process or registering memory; always overwritten."""

RECORDER: Mapping[str, str] = {"TORCH_FR_BUFFER_SIZE": "2000"}
"""Calls that torch's Flight Recorder keeps; not overwritten."""

_AS_ONE: Mapping[str, str] = dict.fromkeys(
    ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NRINGS", "NCCL_MAX_NRINGS"), "1"
)
"""Older names of the channel count: if set, they must be 1."""

_FILES = ("NCCL_CONF_FILE", "NCCL_GRAPH_FILE", "NCCL_TOPO_FILE")
# Spellings that count as 0.
_OFF = ("0", "false", "off", "no")


def pin(environment: MutableMapping[str, str]) -> None:
    """Set all pinned variables. Must run before the first communicator is created.

    Raises:
        EnvironmentProblem: Variables contradict a pin. The message lists all of them.
    """
    wrong = contradictions(environment)
    if wrong:
        lines = "\n".join(
            f"  {name}={got!r}, expected {wanted!r}" for name, wanted, got in sorted(wrong)
        )
        names = " ".join(f"-u {name}" for name, _, _ in sorted(wrong))
        raise EnvironmentProblem(
            "expected NCCL to be free to add in one ring on one channel, whose order is known, got "
            f"an environment that contradicts this:\n{lines}\nTry `env {names}` before the command."
        )
    for name, value in {**PINS, **RECORDER}.items():
        # Keep existing values, because agreeing values may be spelled differently.
        environment.setdefault(name, value)
    environment.update(TORCH_PINS)


def contradictions(environment: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return variables that contradict a pin, each with its expected and its set value."""
    expected = {**PINS, **_AS_ONE}
    return [
        (name, wanted, environment[name])
        for name, wanted in expected.items()
        if name in environment and not _agrees(environment[name], wanted)
    ]


def _agrees(got: str, wanted: str) -> bool:
    if wanted == "0":
        return got.strip().lower() in _OFF
    try:
        # Base 0 reads hexadecimal numbers as well.
        return int(got, 0) == int(wanted)
    except ValueError:
        return got.strip().lower() == wanted.lower()


def shown(environment: Mapping[str, str]) -> Iterator[str]:
    """Describe the settings: pins, other NCCL and torch variables, and files that NCCL reads."""
    yield "pinned: " + " ".join(f"{name}={environment.get(name, '')}" for name in PINS)
    reported = {*PINS, *_FILES}
    also = [
        f"{name}={value}"
        for name, value in sorted(environment.items())
        if name.startswith(("NCCL_", "TORCH_NCCL_", "TORCH_FR_")) and name not in reported
    ]
    if also:
        yield "also set: " + " ".join(also)
    files = [f"{name}={environment[name]}" for name in _FILES if name in environment]
    own = [] if "NCCL_CONF_FILE" in environment else [Path.home() / ".nccl.conf"]
    files += [str(path) for path in (*own, Path("/etc/nccl.conf")) if path.is_file()]
    if files:
        yield "files that NCCL reads: " + " ".join(files)
