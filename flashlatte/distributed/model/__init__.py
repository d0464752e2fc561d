"""Tensor parallelism for transformers models: partition of weights, sharded loading, and the engine's ranks."""

from typing import TYPE_CHECKING

from flashlatte.runtime import lazy

if TYPE_CHECKING:
    from flashlatte.distributed.model.checkpoint import Slices
    from flashlatte.distributed.model.ranks import Ranks
    from flashlatte.distributed.model.rendezvous import Rendezvous
    from flashlatte.distributed.model.shards import divide_mlp, keep_heads
    from flashlatte.distributed.model.single_process import SingleProcess

__all__ = ["Ranks", "Rendezvous", "SingleProcess", "Slices", "divide_mlp", "keep_heads"]

lazy.declare(
    __name__,
    {
        "Ranks": "flashlatte.distributed.model.ranks:Ranks",
        "Rendezvous": "flashlatte.distributed.model.rendezvous:Rendezvous",
        "SingleProcess": "flashlatte.distributed.model.single_process:SingleProcess",
        "Slices": "flashlatte.distributed.model.checkpoint:Slices",
        "divide_mlp": "flashlatte.distributed.model.shards:divide_mlp",
        "keep_heads": "flashlatte.distributed.model.shards:keep_heads",
    },
)
__getattr__, __dir__ = lazy.attach(__name__)
