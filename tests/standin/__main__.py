"""`python -m tests.standin COMMAND...`: run a command whose processes all load the device."""

from __future__ import annotations

import os
import sys

from tests.standin import environment
from tests.standin.build import build


def main(command: list[str]) -> None:
    """Build the device, then replace this process by the command."""
    if not command:
        sys.exit(
            "expected a command. Try python -m tests.standin zero-sim run --device standin PATH"
        )
    build()
    os.execvpe(command[0], command, environment())


if __name__ == "__main__":
    main(sys.argv[1:])
