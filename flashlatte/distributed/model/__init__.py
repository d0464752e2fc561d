"""A transformers model over several processes: who has what of it, its parts of a checkpoint, how plans travel."""

from flashlatte.distributed.model.alone import Alone
from flashlatte.distributed.model.checkpoint import Slices
from flashlatte.distributed.model.meeting import Meeting
from flashlatte.distributed.model.ranks import Ranks
from flashlatte.distributed.model.shards import divide_mlp, keep_heads

__all__ = ["Alone", "Meeting", "Ranks", "Slices", "divide_mlp", "keep_heads"]
