"""The process and its machine: files, signals, terminals, warnings and tracebacks."""
