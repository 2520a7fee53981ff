"""A script as one process of torchrun, which leaves without taking its interpreter down.

A thread of torch that wants Python while that happens ends the process by SIGABRT ("terminate
called without an active exception"), now and then, after all that the script did.
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
