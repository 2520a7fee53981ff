"""Systems of torch as targets: DistributedDataParallel, ZeroRedundancyOptimizer, FSDP2."""
