"""The command line: one module for a command, and what commands share."""
