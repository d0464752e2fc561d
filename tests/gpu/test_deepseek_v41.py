"""DeepSeek-V4.1's layers on a GPU: kernels compared with the reference, and decode steps in a CUDA graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu.harness import DEVICE

from flashlatte.layers import (
    SharedSelections,
    V4Cache,
    V4Step,
    V41Attention,
    V41Config,
    WorkspaceLimits,
    allocate_caches,
)

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
FORMATS = (("bf16", None), ("v41", None), ("v41", "v41_fp4"))
FIELDS = {
    "model_type": "deepseek_v41",
    "num_hidden_layers": 6,
    "compress_ratios": [0, 2, 2, 1, 1, 1],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 5],
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 32,
    "hidden_size": 1024,
    "q_lora_rank": 512,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_groups": 8,
    "o_lora_rank": 128,
    "sliding_window": 128,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 64,
    "max_position_embeddings": 4096,
}


class Layers:
    """Layers for two requests with up to 512 tokens."""

    def __init__(self, cache_format: str, group_format: str | None) -> None:
        torch.manual_seed(0)
        configs = V41Config.layers(FIELDS)
        self.layers = [V41Attention(config, dtype=BF16, device=DEVICE) for config in configs]
        for parameter in (parameter for layer in self.layers for parameter in layer.parameters()):
            torch.nn.init.normal_(parameter, std=0.02 if parameter.dim() > 1 else 1.0)
        self.caches = allocate_caches(
            configs, 16, 64, state_pages=4, cache_format=cache_format, group_format=group_format, device=DEVICE
        )
        self.pages = torch.arange(16, device=DEVICE, dtype=torch.int32).view(2, 8)
        states = torch.arange(4, device=DEVICE, dtype=torch.int32).view(2, 2)
        self.groups: dict[int, tuple[torch.Tensor, torch.Tensor]] = dict.fromkeys((1, 2), (self.pages, states))

    def copies(self) -> list[V4Cache]:
        """Copies of the caches with the same sharing between layers."""
        copied: dict[int, torch.Tensor] = {}

        def copies_of(cache: V4Cache) -> dict[str, Any]:
            return {name: copied.setdefault(value.data_ptr(), value.clone()) for name, value in cache.tensors.items()}

        return [replace(cache, **copies_of(cache)) for cache in self.caches]

    def run(self, hidden: torch.Tensor, step: V4Step, caches: list[V4Cache]) -> torch.Tensor:
        """Outputs [layers, T, hidden_size], for the same hidden states in each layer."""
        selections = SharedSelections()
        return torch.stack(
            [layer(hidden, step, cache, selections) for layer, cache in zip(self.layers, caches, strict=True)]
        )


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("over_workspace", [False, True])
def test_layers(formats: tuple[str, str | None], over_workspace: bool) -> None:
    """Prefill and a few tokens, over pages only, or with prefill over a workspace."""
    limits = WorkspaceLimits(min_queries=90) if over_workspace else None
    layers = Layers(*formats)
    hidden, outs = torch.randn(390, 1024, device=DEVICE).to(BF16), []
    for backend in (None, "reference"):
        for layer in layers.layers:
            layer.backend = backend
        caches, parts = layers.copies(), []
        for spans in ([(0, 300), (0, 90)], [(300, 303), (90, 97)]):
            step = V4Step.from_spans(spans, layers.pages, layers.groups, limits=None if backend else limits)
            parts.append(layers.run(hidden[-step.num_tokens :], step, caches).float())
        outs.append(torch.cat(parts, dim=1))
    error = (outs[0] - outs[1]).flatten(1).norm(dim=1) / outs[1].flatten(1).norm(dim=1)
    # An index key that is rounded differently may select another group.
    assert error[0] < 0.02
    assert error.max() < 0.1


@pytest.mark.parametrize("formats", FORMATS)
def test_decode_in_a_graph(formats: tuple[str, str | None]) -> None:
    """Lengths change between replays, and some replays complete groups."""
    layers = Layers(*formats)
    ids, positions = torch.arange(2, device=DEVICE), torch.tensor([10, 250], device=DEVICE)
    x, hidden = torch.zeros(2, 1024, device=DEVICE, dtype=BF16), torch.randn(18, 1024, device=DEVICE).to(BF16)
    replayed, eager = layers.copies(), layers.copies()

    def decode(caches: list[V4Cache]) -> torch.Tensor:
        return layers.run(x, V4Step.build(ids, positions, layers.pages, layers.groups), caches)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        decode(layers.copies())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = decode(replayed)
    for i in range(9):
        positions.copy_(torch.tensor([10 + i, 250 + i]))
        x.copy_(hidden[2 * i : 2 * i + 2])
        graph.replay()
        assert out.equal(decode(eager))
