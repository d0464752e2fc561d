"""Training steps of small enabled models, sharded by FSDP2 over the ranks of a group."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from integrations.test_transformers_training import LENGTH, checkpointing, gradients, layers_of, make
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from flashlatte.integrations.transformers import enable


def errors(
    name: str, *, use_reentrant: bool | None = None, indexers_only: bool = False, compiled: bool = False
) -> dict[str, float]:
    """Errors of the ranks' gradients, relative to the largest element of one process's, by parameter.

    Each rank trains on a row of a batch, one process on both.
    """
    alone = enable(make(name))
    if indexers_only:
        for key, parameter in alone.named_parameters():
            parameter.requires_grad_(".indexer." in key)
    sharded = copy.deepcopy(alone)
    for layer in layers_of(sharded):
        if compiled:
            layer.compile(backend="aot_eager", fullgraph=True)
        fully_shard(layer)
    fully_shard(sharded)
    if use_reentrant is not None:
        checkpointing(sharded, use_reentrant)
    rows = torch.randint(3, 64, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    own = rows[dist.get_rank()][None]
    for row in rows:
        (alone(row[None], labels=row[None]).loss / len(rows)).backward()
    sharded(own, labels=own).loss.backward()
    expected, found = gradients(alone), gradients(sharded)
    assert expected.keys() == found.keys(), expected.keys() ^ found.keys()
    return {key: _error(found[key], expected[key]) for key in expected}


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert isinstance(found, DTensor)
    return ((found.full_tensor() - expected).abs().max() / expected.abs().max().clamp_min(1e-12)).item()


def loss_in_bf16(name: str) -> tuple[float, float]:
    """The loss of a model of float32 parameters, gathered in bf16, and the largest gradient."""
    model = enable(make(name))
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    rows = torch.randint(3, 64, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    outputs: Any = model(rows, labels=rows)
    outputs.loss.backward()
    found = gradients(model)
    assert all(isinstance(x, DTensor) and x.full_tensor().isfinite().all() for x in found.values())
    return outputs.loss.item(), len(found)
