"""Run a script as a torchrun process that exits without finalizing its interpreter.

A torch thread that needs Python during finalization sometimes aborts the process ("terminate
called without an active exception"), after the script has ended.
"""

import atexit
import os
import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
