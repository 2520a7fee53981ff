"""The command line: a module per command, and shared options."""
