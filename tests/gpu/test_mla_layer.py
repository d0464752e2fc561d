"""The MLA layer on a GPU: compared with float32 on the CPU, and replayed from a CUDA graph with new lengths."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from gpu.harness import DEVICE

from flashlatte import kv_cache
from flashlatte.layers import MLAAttention, MLAConfig, MLAMetadata, MLAMetadataBuilder, Rope

pytestmark = pytest.mark.gpu

CONFIG = MLAConfig(hidden_size=512, num_attention_heads=16, q_lora_rank=256, rope=Rope(max_position=4096))
PAGE_SIZE, PAGES, MAX_SEQ_LEN = 64, 64, 1024
# Relative to the largest element: bf16 has 8 bits, v32's latents 4.
BOUNDS = {"bf16": 0.012, "v32": 0.06, "fp8": 0.06}


def make_layer() -> MLAAttention:
    layer = MLAAttention(CONFIG, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for weight in layer.parameters():
        if weight.dim() > 1:
            weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
    return layer


class Machine:
    """The same requests in a layer, with a cache and a builder, on one device and in one dtype."""

    def __init__(self, layer: MLAAttention, device: torch.device, dtype: torch.dtype, cache_format: str) -> None:
        self.layer = copy.deepcopy(layer).to(device, dtype)
        self.device, self.dtype, self.cache_format = device, dtype, cache_format
        self.cache = kv_cache.allocate(cache_format, PAGES, PAGE_SIZE, device=device)
        self.builder = MLAMetadataBuilder(
            PAGE_SIZE,
            8,
            1024,
            MAX_SEQ_LEN,
            device,
            cache_format=cache_format,
            num_pages=PAGES,
            workspace_tokens=100,
            max_decode_queries=4,
        )

    def build(self, new: list[int], lengths: list[int], table: torch.Tensor, **options: Any) -> MLAMetadata:
        starts = [0]
        for count in new:
            starts.append(starts[-1] + count)
        return self.builder.build(starts, lengths, table, **options)

    def run(self, hidden: torch.Tensor, metadata: MLAMetadata) -> torch.Tensor:
        hidden = hidden.to(self.device, self.dtype)
        return self.layer(hidden, self.cache, metadata, cache_format=self.cache_format)


def tables(requests: int) -> torch.Tensor:
    pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(4))
    return pages[: requests * (PAGES // requests)].view(requests, -1)[:, : MAX_SEQ_LEN // PAGE_SIZE]


def hidden_states(tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, CONFIG.hidden_size, generator=torch.Generator().manual_seed(seed))


def assert_close(result: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    error = ((result.float().cpu() - expected).abs().max() / expected.abs().max()).item()
    assert error <= bound, f"differs by {error:.2e} of the largest, {bound} is accepted"


def assert_same_rows(cache: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare rows: different random rows differ by more than 1 somewhere, and one rounding of e4m3 is less than
    0.5."""
    difference = (kv_cache.unpack(cache).float() - kv_cache.unpack(expected).float()).abs().max().item()
    assert difference < 0.5


@pytest.mark.parametrize("cache_format", BOUNDS)
def test_steps_of_a_batch_are_those_of_float32_on_the_cpu(cache_format: str) -> None:
    layer, table = make_layer(), tables(3)
    machines = (
        Machine(layer, torch.device("cpu"), torch.float32, "fp32"),
        Machine(layer, DEVICE, torch.bfloat16, cache_format),
    )
    steps = [
        ([200, 1, 37], [200, 1, 37], (0, 1, 2)),
        ([1, 3, 150], [201, 4, 187], (0, 1, 2)),
        ([1, 1, 1], [188, 202, 5], (2, 0, 1)),
        ([3, 3, 3], [191, 205, 8], (2, 0, 1)),
        ([250], [258], (1,)),
    ]
    for seed, (new, lengths, order) in enumerate(steps):
        hidden = hidden_states(sum(new), seed)
        expected, result = (m.run(hidden, m.build(new, lengths, table[list(order)])) for m in machines)
        assert_close(result, expected, BOUNDS[cache_format])


@pytest.mark.parametrize("cache_format", ["bf16", "v32"])
@pytest.mark.parametrize("queries", [1, 2])
def test_a_captured_decode_step_replays_for_new_lengths(cache_format: str, queries: int) -> None:
    requests = 4
    machine = Machine(make_layer(), DEVICE, torch.bfloat16, cache_format)
    eager = Machine(make_layer(), DEVICE, torch.bfloat16, cache_format)
    table = tables(requests)
    rows = torch.randn(PAGES, PAGE_SIZE, 1, CONFIG.head_dim, device=DEVICE, dtype=torch.bfloat16)
    hidden = torch.zeros(requests * queries, CONFIG.hidden_size, device=DEVICE, dtype=torch.bfloat16)
    new = [queries] * requests
    metadata = machine.build(new, [queries] * requests, table)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        machine.run(hidden, metadata)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = machine.run(hidden, metadata)
    # The previous steps wrote to the pages.
    for each in (machine, eager):
        each.cache.copy_(rows if cache_format == "bf16" else kv_cache.pack(rows, cache_format))
    for seed, lengths in enumerate(([700, 9, 300, 64], [1000, 65, 2, 63], [8, 1024, 500, 129])):
        fresh = hidden_states(requests * queries, seed).to(DEVICE, torch.bfloat16)
        hidden.copy_(fresh)
        order = torch.randperm(requests, generator=torch.Generator().manual_seed(seed))
        machine.build(new, lengths, table[order])
        out.fill_(torch.nan)
        graph.replay()
        expected = eager.run(fresh, eager.build(new, lengths, table[order]))
        # cuBLAS may choose another kernel inside of a graph.
        assert_close(out, expected.float().cpu(), 0.01)
        assert_same_rows(machine.cache, eager.cache)
    # Two requests fewer: the others are padding.
    lengths = [33, 900]
    fresh = hidden_states(2 * queries, 9).to(DEVICE, torch.bfloat16)
    hidden[: 2 * queries].copy_(fresh)
    machine.build([queries] * 2, lengths, table[:2], pad_requests_to=requests)
    graph.replay()
    expected = eager.run(fresh, eager.build([queries] * 2, lengths, table[:2]))
    assert_close(out[: 2 * queries], expected.float().cpu(), 0.01)
    assert_same_rows(machine.cache, eager.cache)
    # No requests, as on an idle rank of a data-parallel group: padding only, which writes no pages.
    before = machine.cache.clone()
    machine.build([], [], table[:0], pad_requests_to=requests, pad_queries=queries)
    out.fill_(torch.nan)
    graph.replay()
    assert not out.isnan().any()
    assert torch.equal(machine.cache.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("cache_format", ["bf16", "v32"])
def test_a_compiled_layer_is_one_graph_and_equals_the_eager_one(cache_format: str) -> None:
    eager, compiled = (Machine(make_layer(), DEVICE, torch.bfloat16, cache_format) for _ in range(2))
    compiled.layer = torch.compile(compiled.layer, fullgraph=True)  # pyright: ignore[reportAttributeAccessIssue]
    table = tables(2)
    steps = (([200, 30], [200, 30]), ([1, 1], [201, 31]), ([1, 1], [202, 32]), ([1, 1], [203, 33]))
    for seed, (new, lengths) in enumerate(steps):
        hidden = hidden_states(sum(new), seed)
        expected, result = (m.run(hidden, m.build(new, lengths, table)) for m in (eager, compiled))
        assert_close(result, expected.float().cpu(), 0.01)
