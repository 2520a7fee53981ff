"""The contract: checks for calls that NCCL would refuse, hang on or silently misread."""
