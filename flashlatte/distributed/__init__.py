"""Context parallelism and tensor parallelism on several GPUs, based on torch.distributed."""

from typing import TYPE_CHECKING

from flashlatte.runtime import lazy

if TYPE_CHECKING:
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

lazy.declare(
    __name__,
    {
        "ContextParallel": "flashlatte.distributed.context_parallel:ContextParallel",
        "ContextShard": "flashlatte.distributed.training:ContextShard",
        "PrefillRing": "flashlatte.distributed.prefill:PrefillRing",
        "ShardPlan": "flashlatte.distributed.shard_plan:ShardPlan",
        "Sharding": "flashlatte.kv_cache.sharding:Sharding",
        "TensorParallelAttention": "flashlatte.distributed.layer:TensorParallelAttention",
        "failing_together": "flashlatte.distributed.agreement:failing_together",
        "shard_metadata": "flashlatte.distributed.metadata:shard_metadata",
    },
)
__getattr__, __dir__ = lazy.attach(__name__)
