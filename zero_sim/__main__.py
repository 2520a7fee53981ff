"""`python -m zero_sim`, the same as `zero-sim`."""

from __future__ import annotations

from zero_sim.cli.main import main

if __name__ == "__main__":
    main()
