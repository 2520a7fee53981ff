"""Hugging Face's accelerate as targets; `pip install "zero-sim[accelerate]"`."""
