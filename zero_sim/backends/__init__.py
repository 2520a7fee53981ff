"""Real processes as ranks: gloo and NCCL transports, worker teams, and the probe of orders."""
