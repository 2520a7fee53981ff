"""Tensors and rows that several ranks of a script have, compared in every run of it."""
