"""Megatron-Core's data parallelism as targets; `pip install "zero-sim[megatron]"`."""
