"""Run a rank program on a backend."""
