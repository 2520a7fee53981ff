"""fairscale's sharded optimizer as targets; `pip install "zero-sim[fairscale]"`."""
