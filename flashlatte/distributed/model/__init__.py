"""Tensor parallelism for transformers models: partition of weights, sharded loading, and the engine's ranks."""

from flashlatte.distributed.model.checkpoint import Slices
from flashlatte.distributed.model.ranks import Ranks
from flashlatte.distributed.model.rendezvous import Rendezvous
from flashlatte.distributed.model.shards import divide_mlp, keep_heads
from flashlatte.distributed.model.single_process import SingleProcess

__all__ = ["Ranks", "Rendezvous", "SingleProcess", "Slices", "divide_mlp", "keep_heads"]
