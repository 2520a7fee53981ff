"""Save over a checkpoint and get killed before each call that reaches the disk; see test_crash.py.

Usage: crashing.py CONFTEST FOLDER FORM. For n = 0, 1, ... a child copies FOLDER/old to FOLDER/n,
saves into FOLDER/n/checkpoint and is killed before its n-th such call. Prints the number of killed
children.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
from pathlib import Path

import torch

from zero_sim.sim import World


def main() -> None:
    """Kill child after child until one survives."""
    conftest_path, folder, form = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    spec = importlib.util.spec_from_file_location("conftest_of_checkpoints", conftest_path)
    conftest = importlib.util.module_from_spec(spec)
    # The dataclass in it looks up its own module.
    sys.modules[spec.name] = conftest
    spec.loader.exec_module(conftest)
    # The first optimizer makes torch import its compiler: do it once here, not in every child.
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], foreach=False).step()
    for n in range(1000):
        path = folder / str(n)
        shutil.copytree(folder / "old", path)
        child = os.fork()
        if not child:
            save_and_die(conftest, path / "checkpoint", form=form, n=n)
        _, status = os.waitpid(child, 0)
        if status == 0:
            print(n)  # noqa: T201
            return
        assert os.WIFSIGNALED(status), status
        assert os.WTERMSIG(status) == signal.SIGKILL, status


def save_and_die(conftest, path, *, form, n):
    """Save on two ranks; never returns."""
    count = [0]

    def counted(call):
        def do(*args, **kwargs):
            if count[0] == n:
                os.kill(os.getpid(), signal.SIGKILL)
            count[0] += 1
            return call(*args, **kwargs)

        return do

    for name in ("fsync", "rename", "mkdir", "rmdir", "unlink"):
        setattr(os, name, counted(getattr(os, name)))

    def program(rank):
        conftest.save_run(path, conftest.build().train(3), form=form)

    with World(2) as world:
        world.run(program)
    os._exit(0)


if __name__ == "__main__":
    main()
