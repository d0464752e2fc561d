"""Parts of a training step by each rank."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support import rank_layer_jobs
from support.indexer_loss_calls import arguments, with_gradients
from torch.utils.checkpoint import checkpoint

from flashlatte.distributed import ContextShard, TensorParallelAttention
from flashlatte.layers import MLAAttention, MLAConfig, QueryScaling
from flashlatte.ops.indexer_loss import indexer_loss, reference
from flashlatte.testing.cases import SparsePrefillCase

LOSS_CASE = SparsePrefillCase(7, 25, 7, 9, head_dim=8, d_v=6, topk_lengths=True, empty_rows=0.2)


def loss_arguments(dense: bool) -> dict[str, Any]:
    return arguments(LOSS_CASE, dense, dtype=torch.float64)


def loss_of_heads(dense: bool) -> tuple[torch.Tensor, ...]:
    """The indexer's loss with a rank's heads of the attention, in several blocks of queries, and its gradients."""
    given, rank, size = loss_arguments(dense), dist.get_rank(), dist.get_world_size()
    heads = LOSS_CASE.h_q
    given["q"] = given["q"][:, rank * heads // size : (rank + 1) * heads // size]
    width = LOSS_CASE.s_kv if dense else LOSS_CASE.topk
    with mock.patch.object(reference, "BLOCK_BYTES", 200 * width):
        return with_gradients(indexer_loss, given, group=dist.group.WORLD)


# Packed sequences, some shorter than the indexer's 8 tokens, and two tokens that belong to none.
LENGTHS = (9, 1, 17, 6)
TOKENS = sum(LENGTHS) + 2


def training_config(kind: str) -> MLAConfig:
    """``kind``: "sparse", "warm-up" (dense, with an indexer), "dense", "without q_lora", or a form of ``output_gate``
    with sinks, and, without an indexer, a window."""
    gate = kind if kind in ("head", "channel", "query") else None
    sizes = rank_layer_jobs.config(7, "index_fp32" if kind in ("sparse", "warm-up", "query") else None)
    if gate is not None:
        sizes = replace(sizes, output_gate=gate, attn_sink=True, key_rope_norm=True)
        return replace(sizes, query_scaling=QueryScaling(0.1, 4), window=None if sizes.indexer else 5)
    return replace(sizes, q_lora_rank=None) if kind == "without q_lora" else sizes


def step(
    kind: str, layer: Any, hidden: torch.Tensor, part: ContextShard | None, checkpointed: bool = False, **options: Any
) -> dict[str, Any]:
    """Outputs and gradients of a step with the rank's tokens, ``part`` of ``hidden``."""
    generator = torch.Generator().manual_seed(2)
    outputs = torch.randn(hidden.shape, generator=generator, dtype=hidden.dtype).to(hidden.device)
    if part is not None:
        hidden, outputs = part.take(hidden), part.take(outputs)
    hidden = hidden.clone().requires_grad_()
    boundaries = torch.tensor([0, *LENGTHS], device=hidden.device).cumsum(0)

    def attend(hidden: torch.Tensor) -> Any:
        return layer.forward_training(hidden, boundaries, max(LENGTHS), dense=kind == "warm-up", **options)

    result = checkpoint(attend, hidden, use_reentrant=False) if checkpointed else attend(hidden)
    found, total = {"out": result.out}, (result.out * outputs).sum()
    assert (result.indices is not None) == (kind in ("sparse", "query"))
    assert (result.indexer_loss is not None) == (kind in ("sparse", "warm-up", "query"))
    if result.indexer_loss is not None:
        rows = result.num_rows
        mean = result.indexer_loss / rows if part is None else part.mean(result.indexer_loss, rows)
        found, total = found | {"mean loss": mean.detach()}, total + mean
    total.backward()
    module = layer.layer if isinstance(layer, TensorParallelAttention) else layer
    of_parameters = {name: parameter.grad for name, parameter in module.named_parameters()}
    return found | {"hidden": hidden.grad} | of_parameters


def training_inputs(kind: str, device: str = "cpu") -> tuple[MLAAttention, torch.Tensor]:
    sizes = training_config(kind)
    layer = MLAAttention(sizes, dtype=torch.float32, device=device)
    layer.load_weights(rank_layer_jobs.weights(sizes))
    hidden = torch.randn(TOKENS, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    return layer.requires_grad_(True), hidden.to(device)


def assert_same(found: dict[str, Any], expected: dict[str, Any], limit: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, result in found.items():
        error = ((result - expected[name]).abs().max() / expected[name].abs().max()).item()
        # The indexer's gradients are small differences of probabilities.
        factor = 10 if name.startswith(("indexer", "mean loss")) else 1
        assert error < factor * limit, f"{name} differs by {error:.2e} of its largest element"


def tokens_over_ranks(
    kind: str, zigzag: bool, *, device: str = "cpu", limit: float = 1e-5, checkpointed: bool = False
) -> None:
    """Check outputs and the input's gradient for the rank's tokens, and the sum over ranks of parameters' gradients."""
    layer, hidden = training_inputs(kind, device)
    expected = step(kind, copy.deepcopy(layer), hidden, None)
    shard = ContextShard(TOKENS, zigzag=zigzag)
    found = step(kind, layer, hidden, shard, checkpointed, ranks=shard)
    for name in ("out", "hidden"):
        expected[name] = shard.take(expected[name])
    for name, _ in layer.named_parameters():
        dist.all_reduce(found[name], group=shard.group)
    assert_same(found, expected, limit)


def tokens_in_autocast(kind: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        tokens_over_ranks(kind, True, limit=0.02)


def heads_over_ranks(kind: str, token_ranks: int = 1, *, device: str = "cpu", limit: float = 1e-5) -> None:
    """Check that every rank has complete outputs and gradients, those of per-head weights for its own heads, and with
    ``token_ranks`` token ranks those of its own tokens.
    """
    layer, hidden = training_inputs(kind, device)
    expected = step(kind, copy.deepcopy(layer), hidden, None)
    rank, size = dist.get_rank(), dist.get_world_size()
    shard: ContextShard | None = None
    heads_group: Any = None
    if token_ranks > 1:
        each = size // token_ranks
        of_heads = [dist.new_group(range(first, first + each)) for first in range(0, size, each)]
        of_tokens: list[Any] = [dist.new_group(range(first, size, each)) for first in range(each)]
        heads_group, shard = of_heads[rank // each], ContextShard(TOKENS, of_tokens[rank % each])
    divided = TensorParallelAttention(layer.config, heads_group, dtype=torch.float32, device=device)
    divided.layer.load_weights(layer.state_dict())
    divided.requires_grad_(True)
    found = step(kind, divided, hidden, shard, shard=shard)
    names = [name for name, _ in divided.layer.named_parameters()]
    # A shard's weights and their gradients are the same part of the whole.
    part = TensorParallelAttention(layer.config, heads_group, dtype=torch.float32, device=device).layer
    part.load_weights({name: expected[name] for name, _ in layer.named_parameters()})
    expected = {name: expected[name] for name in found if name not in names} | part.state_dict()
    if shard is not None:
        for name in names:
            dist.all_reduce(found[name], group=shard.group)
        for name in ("out", "hidden"):
            expected[name] = shard.take(expected[name])
    assert_same(found, expected, limit)


def different_batches() -> None:
    ContextShard(8 + dist.get_rank())


def differing_steps(fact: str) -> None:
    """A step in which rank 1 differs from the others in one fact."""
    differs = dist.get_rank() == 1
    layer, hidden = training_inputs("warm-up")
    shard = ContextShard(TOKENS)
    boundaries, dense = torch.tensor([0, 20, TOKENS]), True
    if fact == "cu_seqlens" and differs:
        boundaries = torch.tensor([0, 21, TOKENS])
    elif fact == "dtype" and differs:
        layer, hidden = layer.to(torch.bfloat16), hidden.to(torch.bfloat16)
    elif fact == "dense" and differs:
        dense = False
    elif fact == "trained indexer" and differs:
        assert layer.indexer is not None
        layer.indexer.requires_grad_(False)
    elif fact == "heads" and differs:
        part = MLAAttention(layer.config, heads=(0, 3), dtype=torch.float32)
        part.load_weights(layer.state_dict())
        layer = part
    layer.forward_training(shard.take(hidden), boundaries, TOKENS, dense=dense, ranks=shard)


def heads_and_tokens_over_the_same_ranks() -> None:
    layer, hidden = training_inputs("dense")
    divided = TensorParallelAttention(layer.config, dtype=torch.float32)
    shard = ContextShard(TOKENS + 1)
    divided.forward_training(
        shard.take(torch.cat((hidden, hidden[:1]))), torch.tensor([0, TOKENS]), TOKENS, shard=shard
    )


def wrong_rows() -> str:
    """The error of a rank that passes all tokens instead of its own."""
    layer, hidden = training_inputs("dense")
    try:
        layer.forward_training(hidden, torch.tensor([0, TOKENS]), TOKENS, ranks=ContextShard(TOKENS))
    except ValueError as error:
        return str(error)
    raise AssertionError("no error")
