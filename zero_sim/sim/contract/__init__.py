"""The contract: what NCCL would refuse, hang on or misread."""
