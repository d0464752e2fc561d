"""Context parallelism and tensor parallelism on several GPUs, based on torch.distributed."""

from flashlatte.distributed.agreement import failing_together
from flashlatte.distributed.context_parallel import ContextParallel
from flashlatte.distributed.layer import TensorParallelAttention
from flashlatte.distributed.metadata import shard_metadata
from flashlatte.distributed.prefill import PrefillRing
from flashlatte.distributed.shard_plan import ShardPlan
from flashlatte.distributed.training import ContextShard
from flashlatte.kv_cache.sharding import Sharding

__all__ = [
    "ContextParallel",
    "ContextShard",
    "PrefillRing",
    "ShardPlan",
    "Sharding",
    "TensorParallelAttention",
    "failing_together",
    "shard_metadata",
]
