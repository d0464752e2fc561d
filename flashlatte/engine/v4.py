"""DeepSeek-V4 in the engine: a page holds tokens and the groups that they complete; states are stored separately."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from flashlatte.distributed.model.ranks import Ranks
from flashlatte.distributed.model.shards import divide_mlp, keep_groups
from flashlatte.engine.batch import EngineLimits, StepBatch
from flashlatte.engine.formats import window_format
from flashlatte.engine.loading import open_model
from flashlatte.engine.paged import PagedModel, Planner, check_type, config_of, normed
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.index_formats import index_format, index_format_beside
from flashlatte.kv_cache.registry import infer_format
from flashlatte.layers.fused_projections import fuse_weights_on_gpu
from flashlatte.layers.v4 import V4Cache, V4Config
from flashlatte.layers.v4.attention import attend
from flashlatte.layers.v4.builder import States, V4Builder, V4Metadata
from flashlatte.layers.v4.config import MODEL_TYPE
from flashlatte.layers.v4.hyper_connection import read_streams
from flashlatte.layers.v4.modules import check_weights, hidden_projections
from flashlatte.layers.v4.workspace import DEFAULT_LIMITS
from flashlatte.ops.mhc import mhc_post

# Default number of groups of the lowest ratio in a page: the page size of the indexer's kernels.
_GROUPS_OF_A_PAGE = 64


class V4Model(PagedModel):
    """A DeepSeek-V4 that computes the logits of a flat batch over paged caches.

    A page of ``page_size`` tokens holds the page_size // ratio groups of each ratio that these tokens complete, so that
    one block table addresses all of them. Keys of windows stay until their request ends.

    Args:
        model: a transformers ``DeepseekV4ForCausalLM``, whose weights it uses, or the directory of its checkpoint.
        dtype, device: for a checkpoint's weights; default: the stored dtype, and the rank's GPU if there is one.
        backend: backend of the layers' operations; None selects one.
        ranks: ranks that compute it together, each with some of the groups of heads, as in ``Model``; None: this
            process. All ranks store all keys.

    Raises:
        TypeError: a model without a head; layers with hooks or a replaced forward; quantized weights of ``o_a_proj``
            from which the matrix cannot be recovered.
        OSError: no checkpoint can be read there, or one of its files is missing.
        ValueError: a model of another type; a checkpoint with a damaged file, or without some of the model's weights;
            a dtype or device for a loaded model; weights that ranks cannot divide, as in ``Model``.
    """

    # Limits of prompts whose attention uses a workspace.
    workspaces = DEFAULT_LIMITS

    def __init__(
        self,
        model: Any,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        backend: str | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        check_type(config := config_of(model), (MODEL_TYPE,))
        # Before the weights are loaded: transformers would allocate tensors of any size.
        self.layers = self.config = V4Config.layers(config)
        opened = open_model(model, config, dtype, device, ranks)
        model = opened.model
        if ranks is not None:
            pairs = zip(self.layers, model.model.layers, strict=True)
            self.layers = tuple(_keep_share(config, layer, ranks) for config, layer in pairs)
            opened.place(ranks, model.config.o_groups, torch.device(device or ranks.device))
        super().__init__(model, model.model.embed_tokens.weight.device, ranks)
        self.backend = backend
        attentions = [layer.self_attn for layer in model.model.layers]
        for attention, config in zip(attentions, self.layers, strict=True):
            check_weights(attention, config, self.dtype)
        fuse_weights_on_gpu(map(hidden_projections, attentions, self.layers))
        # The states of unfinished groups belong to a request, not to a page. If groups overlap, the first group after a
        # shared page needs the group before it.
        self.prefix_overlap = max(config.overlap * config.ratio for config in self.layers)
        self._streams: int = model.config.hc_mult
        ratios = sorted({config.ratio for config in self.layers} - {0})
        self._tokens_of_groups = math.lcm(*ratios) if ratios else 1
        least = _GROUPS_OF_A_PAGE * (ratios[0] if ratios else 1)
        self.page_size = -(-least // self._tokens_of_groups) * self._tokens_of_groups

    def layouts(self, cache_format: str, page_size: int) -> list[tuple[CacheFormat, int]]:
        """The window of each layer, and its groups and index keys if it has them."""
        if page_size % self._tokens_of_groups:
            raise ValueError(
                f"page_size must be a multiple of {self._tokens_of_groups}, so that groups end with it, got {page_size}"
            )
        found = []
        for config in self.layers:
            layout = window_format(config, cache_format, self.dtype)
            found.append((layout, page_size))
            if config.ratio:
                found.append((layout, page_size // config.ratio))
            if config.indexer is not None:
                keys = index_format(index_format_beside(layout), config.indexer.head_dim)
                found.append((keys, page_size // config.ratio))
        return found

    def planner(self, cache_format: str, limits: EngineLimits) -> Planner:
        max_pages = min(limits.num_pages, -(-self.max_position // limits.page_size))
        builder = V4Builder(
            self.layers,
            limits.page_size,
            limits.max_num_seqs,
            max_pages,
            self.device,
            num_speculative_tokens=limits.num_speculative_tokens,
            limits=self.workspaces,
            backend=self.backend,
        )

        def plan(batch: StepBatch, pad_to: int | None) -> V4Metadata:
            spans = [(length - count, length) for count, length in zip(batch.counts, batch.lengths, strict=True)]
            return builder.build(
                spans,
                batch.page_table(),
                batch.state_indices,
                shared_tokens=batch.num_shared_tokens,
                pad_requests_to=pad_to,
            )

        return plan

    @torch.inference_mode()
    def __call__(
        self, tokens: torch.Tensor, caches: list[torch.Tensor], metadata: V4Metadata, rows: torch.Tensor
    ) -> torch.Tensor:
        step = metadata.step()
        embedded = self._body.embed_tokens(tokens)
        streams = embedded.unsqueeze(1).repeat(1, self._streams, 1)  # [T, streams, hidden_size]
        remaining = iter(caches)
        for layer, config, states in zip(self._body.layers, self.layers, metadata.states, strict=True):
            cache = _cache_of(config, remaining, states)
            shares, mixture, seen = read_streams(layer.attn_hc, streams, self.backend)
            attended = attend(layer.self_attn, config, normed(layer.input_layernorm, seen), step, cache, self.backend)
            streams = mhc_post(self.ranks.sum(attended), streams, shares, mixture, backend=self.backend)
            shares, mixture, seen = read_streams(layer.ffn_hc, streams, self.backend)
            # The first layers choose experts by token id.
            fed = layer.mlp(normed(layer.post_attention_layernorm, seen)[None], input_ids=tokens[None])[0]
            streams = mhc_post(fed, streams, shares, mixture, backend=self.backend)
        return self._head(normed(self._body.norm, self._body.hc_head(streams[rows][None])[0]))


def _keep_share(config: V4Config, layer: Any, ranks: Ranks) -> V4Config:
    """Reduce a decoder layer to this rank's shard; returns the config of its attention."""
    kept = keep_groups(config, layer.self_attn, ranks)
    divide_mlp(layer.mlp, ranks)
    return kept


def _cache_of(config: V4Config, caches: Iterator[torch.Tensor], states: States) -> V4Cache:
    """The caches of the next layer, in the order of ``allocate``."""
    window = next(caches)
    groups = next(caches) if config.ratio else None
    keys = None if config.indexer is None else next(caches)
    layout = infer_format(window, rows=(config.head_dim - config.rope_dim, config.rope_dim))
    return V4Cache(window, groups, states[0], keys, states[1], layout)
