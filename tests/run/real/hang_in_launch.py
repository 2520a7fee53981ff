"""`zero-sim run` under torchrun with a system whose rank 1 hangs; a script for test_torchrun."""

import sys

import targets

from zero_sim.cli.main import main
from zero_sim.targets import registry

registry._TARGETS["zero_sim"] = targets.hangs
main(["run", *sys.argv[1:]])
