"""torchrun and accelerate commands that a script runs to launch ranks in a new process.

Such a command is replaced by `zero-sim torchrun` with the run's settings.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from zero_sim.errors import UsageError
from zero_sim.sim.world.rank_threads import rank_state

_TORCHRUN = frozenset({"torch.distributed.launch", "torch.distributed.run"})
_ACCELERATE = "accelerate.commands.launch"
# A command with any of these characters needs a real shell, so it is left alone.
_SHELL_CHARACTERS = frozenset("|&;<>()$`*?~\n")
_RENAMED = {
    "--num_processes": "--nproc-per-node",
    "--num_machines": "--nnodes",
    "-m": "-m",
    "--module": "-m",
}
# accelerate's options without a value.
_FLAGS = frozenset({"--cpu", "--module", "--multi_gpu", "--same_network", "-m", "--quiet", "-q"})
# accelerate's options about machines, which a simulated world ignores.
_MACHINE_OPTIONS = frozenset(
    {"--config_file", "--gpu_ids", "--machine_rank", "--main_process_ip", "--main_process_port"}
)


def torchrun_arguments(command: object, *, shell: bool = False) -> list[str] | None:
    """Return the equivalent torchrun arguments of a command; None for other commands.

    Args:
        command: Command in any form that `subprocess.Popen` takes.
        shell: True if the command is for a shell.

    Raises:
        UsageError: An accelerate command has options that set up more than ranks.
    """
    words = _words(command, shell=shell)
    if not words:
        return None
    name, *rest = words
    name = os.path.basename(name)
    if name.startswith("python"):
        # Interpreter options that do not affect ranks.
        while rest and rest[0] in ("-u", "-O", "-B"):
            rest = rest[1:]
        if len(rest) < 2 or rest[0] != "-m":
            return None
        name, rest = rest[1], rest[2:]
    if name == "accelerate" and rest[:1] == ["launch"]:
        name, rest = _ACCELERATE, rest[1:]
    if name == _ACCELERATE:
        return _from_accelerate(rest)
    if name == "torchrun" or name in _TORCHRUN:
        # torchrun does not accept these options of torch.distributed.launch, but works like this
        # anyway.
        return [word for word in rest if word not in ("--use_env", "--use-env")]
    return None


def _words(command: object, *, shell: bool) -> list[str]:
    if isinstance(command, (str, bytes, os.PathLike)):
        text = os.fsdecode(command)
        if not shell:
            # Without a shell, a string is the program's name, including spaces.
            return [text]
        return [] if _SHELL_CHARACTERS & set(text) else shlex.split(text)
    if isinstance(command, Sequence):
        return [os.fsdecode(word) for word in command]
    return []


def _from_accelerate(words: Sequence[str]) -> list[str]:
    """Translate arguments of `accelerate launch` to torchrun arguments."""
    left, found = list(words), []
    # Stop at the script's name: the script's own options follow.
    while left and left[0].startswith("-"):
        name, has_value, value = left.pop(0).partition("=")
        name = name if not name.startswith("--") else "--" + name[2:].replace("-", "_")
        if not has_value and name not in _FLAGS:
            value = left.pop(0) if left else ""
        if name in _RENAMED:
            found += [_RENAMED[name], value] if value else [_RENAMED[name]]
        elif name not in _FLAGS and name not in _MACHINE_OPTIONS:
            # Ignoring an option such as --mixed_precision would change the training.
            raise UsageError(
                f"expected options of `accelerate launch` that only set the number of ranks, "
                f"got {name}. Use `zero-sim torchrun`, and set this in the script's Accelerator."
            )
    return [*found, *left]


@contextlib.contextmanager
def commands_of_ranks(
    options: Sequence[str], before_launch: Callable[[str], None]
) -> Iterator[None]:
    """Replace launch commands in ranks by `zero-sim torchrun`.

    Args:
        options: Options of `zero-sim torchrun`, added before the command's own options.
        before_launch: Receives the command as text; may raise to refuse it.
    """
    popen, system = subprocess.Popen.__init__, os.system

    def replaced(command: object, *, shell: bool) -> list[str] | None:
        # Leave commands of other threads alone, such as a test runner's.
        if rank_state.join is None:
            return None
        arguments = torchrun_arguments(command, shell=shell)
        if arguments is None:
            return None
        before_launch(shlex.join(["torchrun", *arguments]))
        return [sys.executable, "-m", "zero_sim", "torchrun", *options, *arguments]

    def start(self: Any, args: Any, *rest: Any, **settings: Any) -> None:
        other = replaced(args, shell=bool(settings.get("shell")))
        if other is None:
            popen(self, args, *rest, **settings)
            return
        # The command is split into words already, so it needs neither shell nor executable.
        popen(self, other, *rest, **settings | {"shell": False, "executable": None})

    def call(command: Any) -> int:
        other = replaced(command, shell=True)
        return system(command if other is None else shlex.join(other))

    with (
        mock.patch.object(subprocess.Popen, "__init__", start),
        mock.patch.object(os, "system", call),
    ):
        yield
