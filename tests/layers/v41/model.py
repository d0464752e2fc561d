"""The layers of a small random DeepSeek-V4.1, with caches, and hidden states for them."""

from __future__ import annotations

import random

import torch

from flashlatte.layers.v4 import V4Step
from flashlatte.layers.v41 import SharedSelections, V41Attention, V41Config, allocate_caches

PAGE_SIZE, STATE_PAGE_SIZE = 4, 3

FIELDS = {
    "model_type": "deepseek_v41",
    "num_hidden_layers": 8,
    "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1],
    # Groups of 1 are shared by layers 4 to 7, selections of 4 by 5; 6 and 7 select within the blocks of 4.
    "kv_source_layer_ids": [1, 4],
    "index_source_layer_ids": [1, 3, 4, 6, 7],
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 4,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 6,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 40000.0,
    "max_position_embeddings": 256,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
# Every layer stores and selects; blocks that do not divide pages; all in one layer, with a ragged last block.
SIZES = (
    FIELDS,
    FIELDS
    | {
        "num_hidden_layers": 3,
        "compress_ratios": [2, 1, 2],
        "kv_source_layer_ids": [0, 1, 2],
        "index_source_layer_ids": [0, 1, 2],
        "candidate_source_layer_id": -1,
        "num_attention_heads": 6,
        "o_groups": 3,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "index_head_dim": 64,
        "sliding_window": 1,
        "rope_scaling": None,
    },
    FIELDS
    | {
        "num_hidden_layers": 4,
        "compress_ratios": [2, 2, 2, 0],
        "kv_source_layer_ids": [0],
        "index_source_layer_ids": [0, 1, 2],
        "candidate_source_layer_id": 0,
        "candidate_topk_blocks": 2,
        "candidate_block_size": 6,
        "index_topk": 7,
    },
)


def steps_of(lengths, seed):
    """The tokens of each request in each step; steps mix prefill, its chunks, and decode."""
    rng, done, steps = random.Random(seed), [0] * len(lengths), []
    while done != lengths:
        ends = [min(n, d + rng.choice([0, 1, 1, 3, 9])) for d, n in zip(done, lengths, strict=True)]
        if ends != done:
            steps.append(list(zip(done, ends, strict=True)))
        done = ends
    return steps


class Model:
    """The layers of a model with caches for ``requests`` requests of up to ``tokens`` tokens, pages interleaved.

    Rows that have not been written hold NaN, if the cache's format has NaN.
    """

    def __init__(
        self, fields, weights, requests, tokens, cache_format="fp32", group_format=None, dtype=None, backend=None
    ):
        self.configs = V41Config.layers(fields)
        self.layers = [V41Attention(config, dtype=dtype, backend=backend) for config in self.configs]
        for layer, tensors in zip(self.layers, weights, strict=True):
            layer.load_weights(tensors)
        columns = -(-tokens // PAGE_SIZE)
        self.table = torch.arange(requests * columns).view(columns, requests).T.contiguous()
        self.state_table = torch.arange(requests * 3).flip(0).view(requests, 3)
        self.caches = allocate_caches(
            self.configs,
            requests * columns,
            PAGE_SIZE,
            state_pages=requests * 3,
            state_page_size=STATE_PAGE_SIZE,
            cache_format=cache_format,
            group_format=group_format,
        )
        for cache in self.caches:
            for pages in cache.tensors.values():
                if pages.is_floating_point():
                    pages.fill_(torch.nan)

    def step(self, spans, limits=None, padding=0):
        groups = dict.fromkeys({config.ratio for config in self.configs} - {0}, (self.table, self.state_table))
        window = self.configs[0].window
        if limits is not None:
            return V4Step.from_spans(spans, self.table, groups, window=window, page_size=PAGE_SIZE, limits=limits)
        ids = [request for request, span in enumerate(spans) for _ in range(*span)] + [-1] * padding
        positions = [position for span in spans for position in range(*span)] + [7] * padding
        return V4Step.build(
            torch.tensor(ids), torch.tensor(positions), self.table, groups, window=window, page_size=PAGE_SIZE
        )

    def run(self, hidden, spans, limits=None, padding=0, step=None, caches=None):
        """Outputs of each layer for new tokens of requests with hidden states [layers][requests][n, hidden_size]."""
        step, selections, found = step or self.step(spans, limits, padding), SharedSelections(), []
        for layer, cache, states in zip(self.layers, caches or self.caches, hidden, strict=True):
            rows = [h[begin:end] for h, (begin, end) in zip(states, spans, strict=True)]
            counts = [len(part) for part in rows]
            padded = torch.cat([*rows, torch.randn(padding, rows[0].shape[1])])
            out = layer(padded.to(layer.q_a_proj.weight.dtype), step, cache, selections)
            found.append(out[: sum(counts)].split(counts))
        return found


def hidden_states(fields, lengths, seed):
    draw = torch.Generator().manual_seed(seed + 100)
    width, layers = fields["hidden_size"], fields["num_hidden_layers"]
    return [[torch.randn(n, width, generator=draw) for n in lengths] for _ in range(layers)]
