"""A hand-written ZeRO-1: AdamW whose state is sharded, without padding, over all ranks."""

from my_optimizer.sharded_adamw import ShardedAdamW

__all__ = ["ShardedAdamW"]
