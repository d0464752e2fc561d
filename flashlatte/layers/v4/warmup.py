"""Runs the step shapes of DeepSeek-V4's attention, to compile or list the kernels that they launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TypeVar

import torch

from flashlatte.kv_cache.registry import DEEPSEEK_V4_FORMAT
from flashlatte.layers.v4.attention import V4Attention
from flashlatte.layers.v4.cache import V4Cache
from flashlatte.layers.v4.config import V4Config
from flashlatte.layers.v4.hyper_connection import read_streams
from flashlatte.layers.v4.step import V4Step
from flashlatte.layers.v4.workspace import DEFAULT_LIMITS
from flashlatte.layers.warmup import FEW_TOKENS, MANY_TOKENS, NoArithmetic, batches_up_to
from flashlatte.ops.mhc import mhc_post

Config = TypeVar("Config", bound=V4Config)


def warmup_steps(
    layers: Sequence[V4Config],
    *,
    cache_format: str = DEEPSEEK_V4_FORMAT,
    dtype: torch.dtype = torch.bfloat16,
    ranks: int = 1,
    streams: int = 4,
    page_size: int = 64,
    max_batch: int = 256,
    max_queries: int = 2,
    device: str = "cpu",
) -> Iterator[str]:
    """Run prefill and decode steps of each distinct layer; yields the name of each. Results are uninitialized.

    Args:
        layers: configurations of the model's layers; equal ones run once.
        cache_format, dtype, page_size, max_batch, max_queries, device: as for ``layers.warmup.warmup_steps``.
        ranks: number of ranks that divide heads and groups of heads evenly.
        streams: number of residual streams of hidden states.

    Raises:
        ValueError: a format that does not fit the layers.
    """
    for config in dict.fromkeys(layers):
        config = reduced(config, ranks)
        layer = V4Attention(config, dtype=dtype, device=device)
        state_page_size = max(config.ratio, 1)
        cache = V4Cache.allocate(
            config, 1, page_size, state_page_size=state_page_size, cache_format=cache_format, device=device
        )
        for length in step_lengths(config):
            for name, step in layer_steps((config,), length, page_size, max_batch, max_queries, device):
                yield f"ratio {config.ratio}, {name}, requests of {length} tokens"
                hidden = torch.zeros(len(step.positions), config.hidden_size, dtype=dtype, device=device)
                with NoArithmetic():
                    layer(hidden, step, cache)
    for tokens in (*batches_up_to(max_batch * max_queries), DEFAULT_LIMITS.min_queries):
        yield f"streams of {tokens} tokens"
        _run_hyper_connection(torch.zeros(tokens, streams, layers[0].hidden_size, dtype=dtype, device=device))


def reduced(config: Config, ranks: int) -> Config:
    """A rank's share of a layer with fewer positions, and narrow hidden states, which do not change its kernels."""
    return replace(
        config,
        hidden_size=min(config.hidden_size, 1024),
        num_attention_heads=config.num_attention_heads // ranks,
        o_groups=config.o_groups // ranks,
        rope=replace(config.rope, max_position=min(MANY_TOKENS, config.rope.max_position)),
    )


def step_lengths(config: V4Config) -> list[int]:
    """Tokens of the requests of each step."""
    longest = config.rope.max_position
    return sorted({min(FEW_TOKENS, longest), longest})


def _run_hyper_connection(streams: torch.Tensor) -> None:
    """The hyper-connection of a decoder layer over its streams [T, n, hidden]."""
    count, width = streams.shape[1], streams[0].numel()
    parameters = {
        name: torch.zeros(*shape, device=streams.device)
        for name, shape in (("fn", ((2 + count) * count, width)), ("base", ((2 + count) * count,)), ("scale", (3,)))
    }
    constants = {"input_norm": SimpleNamespace(eps=1e-6), "hc_eps": 1e-6, "hc_sinkhorn_iters": 20}
    with NoArithmetic():
        post, comb, mixed = read_streams(SimpleNamespace(**parameters, **constants), streams, None)
        mhc_post(mixed, streams, post, comb)


def layer_steps(
    configs: Sequence[V4Config], length: int, page_size: int, max_batch: int, max_queries: int, device: str
) -> Iterator[tuple[str, V4Step]]:
    """Prefill and decode steps with groups of all ratios of these layers, and their names."""
    many = min(DEFAULT_LIMITS.min_queries, length)
    prefills: dict[str, list[tuple[int, int]]] = {
        "prefill": [(0, many)],
        "prefill behind a prefix": [(length - many, length)],
        "prefill of few tokens": [(length - min(48, length), length)],
        # The decode token misaligns the prefill parts within the step's tensors.
        "prefills with a decode of 1": [(length - 1, length), (0, many), (length - 7, length)],
    }
    for name, spans in prefills.items():
        yield name, _step(configs, spans, length, page_size, device, as_graph=False)
    for queries in range(1, max_queries + 1):
        for batch in batches_up_to(max_batch):
            spans = [(length - queries, length)] * batch
            yield f"decode of {batch} x {queries}", _step(configs, spans, length, page_size, device, as_graph=True)


def _step(
    configs: Sequence[V4Config],
    spans: list[tuple[int, int]],
    length: int,
    page_size: int,
    device: str,
    *,
    as_graph: bool,
) -> V4Step:
    """A step whose requests share pages, since results are not used."""

    def table(pages: int) -> torch.Tensor:
        return torch.zeros(len(spans), pages, dtype=torch.int32, device=device)

    groups = {}
    for config in configs:
        if config.ratio:
            group_pages = -(-length // config.ratio // page_size)
            groups[config.ratio] = table(max(group_pages, 1)), table(1 + config.overlap)
    return V4Step.from_spans(
        spans,
        table(-(-length // page_size)),
        groups,
        window=configs[0].window,
        page_size=page_size,
        limits=None if as_graph else DEFAULT_LIMITS,
    )
