"""The process and its machine: devices, files, signals, terminals, warnings and tracebacks."""
