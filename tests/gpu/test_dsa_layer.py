"""The MLA layer with an indexer on a GPU: compared with float32 on the CPU, and replayed from a graph with other
lengths.

Rounding may change the selection among tokens with nearly equal scores. Attention is therefore compared for the GPU's
selection, and the selection separately.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from gpu.harness import DEVICE

from flashlatte import kv_cache
from flashlatte.layers import IndexerConfig, MLAAttention, MLAConfig, MLAMetadata, MLAMetadataBuilder, Rope
from flashlatte.layers.indexer import MAX_OVERLAPPED_TOKENS
from flashlatte.ops.index_quantize import index_quantize
from flashlatte.runtime.side_stream import SideStream

pytestmark = pytest.mark.gpu

CONFIG = MLAConfig(
    hidden_size=512,
    num_attention_heads=16,
    q_lora_rank=256,
    rope=Rope(max_position=8192),
    indexer=IndexerConfig(num_heads=32, topk=128),
)
PAGE_SIZE = 64
# Relative to the largest element: bf16 has 8 bits, v32's latents 4.
BOUNDS = {"bf16": 0.012, "v32": 0.06}
# Fraction of a selection that float32 selects too; above 0.96 on random data with e4m3 keys.
OVERLAPS = {"index_bf16": 0.98, "index_fp8": 0.93}


def make_layer(topk: int) -> MLAAttention:
    assert CONFIG.indexer is not None
    config = dataclasses.replace(CONFIG, indexer=dataclasses.replace(CONFIG.indexer, topk=topk))
    layer = MLAAttention(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for name, weight in layer.named_parameters():
        if weight.dim() > 1:
            weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
        elif name.endswith("bias"):
            weight.zero_()
    return layer


class Machine:
    """The same requests in a layer, with its caches and a builder, on one device and in one dtype."""

    def __init__(
        self,
        layer: MLAAttention,
        device: torch.device,
        dtype: torch.dtype,
        cache_format: str,
        index_format: str,
        pages: int,
        max_seq_len: int,
        **options: Any,
    ) -> None:
        assert layer.config.indexer is not None
        self.layer = copy.deepcopy(layer).to(device, dtype)
        self.device, self.dtype, self.cache_format = device, dtype, cache_format
        self.cache = kv_cache.allocate(cache_format, pages, PAGE_SIZE, device=device)
        self.index_cache = kv_cache.allocate(index_format, pages, PAGE_SIZE, head_dim=128, device=device)
        self.builder = MLAMetadataBuilder(
            PAGE_SIZE,
            8,
            1024,
            max_seq_len,
            device,
            cache_format=cache_format,
            num_pages=pages,
            max_decode_queries=4,
            topk=layer.config.indexer.topk,
            **options,
        )

    def build(self, new: list[int], lengths: list[int], table: torch.Tensor, **options: Any) -> MLAMetadata:
        starts = [0]
        for count in new:
            starts.append(starts[-1] + count)
        return self.builder.build(starts, lengths, table, **options)

    def run(self, hidden: torch.Tensor, metadata: MLAMetadata, indices: torch.Tensor | None = None) -> torch.Tensor:
        hidden = hidden.to(self.device, self.dtype)
        return self.layer(
            hidden,
            self.cache,
            metadata,
            cache_format=self.cache_format,
            index_cache=self.index_cache,
            indices=indices,
        )


def tables(requests: int, pages_each: int) -> torch.Tensor:
    pages = torch.randperm(requests * pages_each, generator=torch.Generator().manual_seed(4))
    return pages.view(requests, pages_each)


def hidden_states(tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, CONFIG.hidden_size, generator=torch.Generator().manual_seed(seed))


def slots_of(metadata: MLAMetadata) -> torch.Tensor:
    assert metadata.selection is not None
    assert metadata.selection.slots is not None
    return metadata.selection.slots


def assert_close(result: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    error = ((result.float().cpu() - expected.float().cpu()).abs().max() / expected.float().abs().max()).item()
    assert error <= bound, f"differs by {error:.2e} of the largest, {bound} is accepted"


def assert_same_choice(chosen: torch.Tensor, expected: torch.Tensor, least: float) -> None:
    """Check that selections have the same number of tokens, no duplicates, and nearly the same tokens."""
    both = total = 0
    for mine, other in zip(chosen.tolist(), expected.tolist(), strict=True):
        a, b = [slot for slot in mine if slot >= 0], {slot for slot in other if slot >= 0}
        assert len(set(a)) == len(a) == len(b)
        both, total = both + len(b.intersection(a)), total + len(b)
    assert both >= least * total, f"{both / total:.3f} of the choice is the same, {least} is accepted"


@pytest.mark.parametrize(
    ("cache_format", "index_format"), [("bf16", "index_bf16"), ("bf16", "index_fp8"), ("v32", "index_fp8")]
)
def test_steps_of_a_batch_are_those_of_float32_on_the_cpu(cache_format: str, index_format: str) -> None:
    layer, table = make_layer(topk=128), tables(3, 10)
    # Where nothing is gathered a choice is slots, also of prefill, which the other machine can be given.
    shape: dict[str, Any] = {"pages": 30, "max_seq_len": 640, "gather_tokens": 1}
    exact = Machine(layer, torch.device("cpu"), torch.float32, "fp32", "index_fp32", **shape)
    machine = Machine(layer, DEVICE, torch.bfloat16, cache_format, index_format, **shape)
    gathering = Machine(layer, DEVICE, torch.bfloat16, cache_format, index_format, **shape | {"gather_tokens": 10**6})
    steps = [
        ([200, 2, 37], [200, 2, 37], (0, 1, 2)),
        ([1, 3, 150], [201, 5, 187], (0, 1, 2)),
        ([1, 1, 1], [188, 202, 6], (2, 0, 1)),
        ([4, 4, 4], [192, 206, 10], (2, 0, 1)),
        ([300, 1], [506, 193], (0, 2)),
        ([250], [260], (1,)),
    ]
    for seed, (new, lengths, order) in enumerate(steps):
        hidden = hidden_states(sum(new), seed)
        ours = machine.build(new, lengths, table[list(order)])
        result = machine.run(hidden, ours)
        again = machine.run(hidden, ours)
        assert torch.equal(result, again), "not the same bits from run to run"
        wanted = exact.build(new, lengths, table[list(order)])
        exact.run(hidden, wanted)
        sparse = ours.num_tokens if ours.selection.chunks is not None else ours.num_decode_tokens  # type: ignore[union-attr]
        assert_same_choice(slots_of(ours)[:sparse], slots_of(wanted)[:sparse], OVERLAPS[index_format])
        # Tokens without a selection attend to all tokens; then both machines do.
        along = slots_of(ours)[:sparse].cpu()
        expected = exact.run(hidden, wanted, along if sparse == ours.num_tokens else None)
        if sparse in (0, ours.num_tokens):
            assert_close(result, expected, BOUNDS[cache_format])
        other = gathering.run(hidden, gathering.build(new, lengths, table[list(order)]))
        assert_close(other, result, 0.01)


@pytest.mark.parametrize(("cache_format", "index_format"), [("bf16", "index_bf16"), ("v32", "index_fp8")])
@pytest.mark.parametrize("queries", [1, 2, 4])
def test_a_captured_decode_step_replays_across_2048_tokens(cache_format: str, index_format: str, queries: int) -> None:
    requests, topk, max_seq_len = 4, 2048, 4096
    layer, table = make_layer(topk), tables(requests, max_seq_len // PAGE_SIZE)
    shape: dict[str, Any] = {"pages": table.numel(), "max_seq_len": max_seq_len}
    machine, eager = (Machine(layer, DEVICE, torch.bfloat16, cache_format, index_format, **shape) for _ in range(2))
    hidden = torch.zeros(requests * queries, CONFIG.hidden_size, device=DEVICE, dtype=torch.bfloat16)
    new = [queries] * requests
    metadata = machine.build(new, new, table)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        machine.run(hidden, metadata)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = machine.run(hidden, metadata)
    # The previous steps wrote to the pages.
    rows = torch.randn(table.numel(), PAGE_SIZE, 1, CONFIG.head_dim, device=DEVICE, dtype=torch.bfloat16)
    keys = torch.randn(table.numel() * PAGE_SIZE, 128, device=DEVICE)
    for each in (machine, eager):
        kv_cache.write(
            each.cache, torch.arange(len(keys), device=DEVICE), rows.flatten(0, 2), cache_format=cache_format
        )
        index_quantize(each.index_cache, torch.arange(len(keys), device=DEVICE), keys)
    steps = ([1900, 9, 300, 64], [2047, 2048, 2049, 2050], [4096, 5, 2100, 3000], [2046, 2200, 4000, 2048])
    for seed, lengths in enumerate(steps):
        fresh = hidden_states(requests * queries, seed).to(DEVICE, torch.bfloat16)
        hidden.copy_(fresh)
        order = torch.randperm(requests, generator=torch.Generator().manual_seed(seed))
        machine.build(new, lengths, table[order])
        out.fill_(torch.nan)
        slots_of(metadata).fill_(7)
        graph.replay()
        chosen = slots_of(metadata).clone()
        for request, length in enumerate(lengths):
            pages = table[order[request]]
            for query in range(queries):
                seen = max(length - queries + 1 + query, 0)
                position = torch.arange(seen)
                every = pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
                row = chosen[request * queries + query].cpu()
                kept = row[row >= 0]
                assert len(kept) == len(set(kept.tolist())) == min(seen, topk)
                assert set(kept.tolist()) <= set(every.tolist())
        plan = eager.build(new, lengths, table[order])
        eager.run(fresh, plan)
        assert_same_choice(chosen, slots_of(plan), 0.99)
        # cuBLAS may choose another kernel inside of a graph.
        assert_close(out, eager.run(fresh, plan, chosen), 0.01)


@pytest.mark.parametrize("requests", [2, MAX_OVERLAPPED_TOKENS])
def test_a_graph_whose_indexer_runs_beside_the_layer_gives_the_bits_of_one_in_order(
    requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers share selection buffers: the second selection must wait for the first layer's attention."""
    layer, table = make_layer(topk=128), tables(requests, 16)
    shape: dict[str, Any] = {"pages": table.numel(), "max_seq_len": 1024}
    machine = Machine(layer, DEVICE, torch.bfloat16, "v32", "index_fp8", **shape)
    machine.builder = MLAMetadataBuilder(
        PAGE_SIZE, requests, requests, 1024, DEVICE, cache_format="v32", topk=128, num_pages=table.numel()
    )
    index_quantize(
        machine.index_cache,
        torch.arange(table.numel() * PAGE_SIZE, device=DEVICE),
        torch.randn(table.numel() * PAGE_SIZE, 128, device=DEVICE),
    )
    hidden = torch.zeros(requests, CONFIG.hidden_size, device=DEVICE, dtype=torch.bfloat16)
    metadata = machine.build([1] * requests, [900] * requests, table)

    def step() -> torch.Tensor:
        first = machine.run(hidden, metadata)
        return first + machine.run(hidden + first, metadata)

    def captured() -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        return graph, out

    step()
    torch.cuda.synchronize()
    beside, result = captured()
    # Without capture, everything runs in one stream.
    monkeypatch.setattr(SideStream, "__init__", lambda self, *_: setattr(self, "_stream", None))
    in_order, expected = captured()
    for seed in range(30):
        hidden.copy_(hidden_states(requests, seed))
        machine.build([1] * requests, [100 + 25 * seed + request for request in range(requests)], table)
        for graph in (beside, in_order):
            slots_of(metadata).fill_(-1)
            graph.replay()
            if graph is beside:
                chosen = slots_of(metadata).clone()
        assert slots_of(metadata).equal(chosen)
        assert result.equal(expected)
