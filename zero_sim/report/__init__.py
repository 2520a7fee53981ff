"""Results made readable. Reads records only; knows nothing of how they came about."""
