"""Refusals of modules and optimizers that ZeRO cannot train; no value depends on them."""
