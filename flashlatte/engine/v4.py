"""DeepSeek-V4 in the engine: a page holds tokens and the groups that they finish; states lie beside the pages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashlatte.engine.batch import Batch
from flashlatte.engine.paged import PagedModel, Planner, load
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.index_formats import index_format, index_format_beside
from flashlatte.kv_cache.registry import as_format
from flashlatte.layers.v4 import V4Cache, V4Config, V4Step
from flashlatte.layers.v4.attention import attend
from flashlatte.runtime.transfer import to_device

# Groups of the lowest ratio that a page holds, where nobody chose its size: what kernels of the indexer are made for.
_GROUPS_OF_A_PAGE = 64

# Of a layer: those of groups, and those of index keys; None where there are none.
States = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class V4Metadata:
    """A step, and the states of its layers."""

    step: V4Step
    states: list[States]

    @property
    def num_tokens(self) -> int:
        return self.step.num_tokens


class V4Model(PagedModel):
    """A DeepSeek-V4 that computes the logits of a flat batch over paged caches.

    A page of ``page_size`` tokens holds the groups of each ratio that these tokens finish, page_size // ratio of them,
    so that one table leads to all. Windows' keys stay as long as their request.

    Args:
        model: a transformers ``DeepseekV4ForCausalLM``, whose weights it uses, or the directory of its checkpoint.
        backend: of the layers' operations; None chooses.

    Raises:
        ValueError: a model of another type.
    """

    # What unfinished groups need is no page's: it goes with the request.
    moves_pages = False
    # Plans of workspaces and tables of states are a step's own.
    fits_graphs = False

    def __init__(self, model: Any, *, backend: str | None = None) -> None:
        if isinstance(model, (str, Path)):
            model = load(model)
        super().__init__(model, model.model.embed_tokens.weight.device)
        self.layers = self.config = V4Config.layers(model.config)
        self.backend = backend
        self._streams: int = model.config.hc_mult
        ratios = sorted({config.ratio for config in self.layers} - {0})
        self._tokens_of_groups = math.lcm(*ratios) if ratios else 1
        least = _GROUPS_OF_A_PAGE * (ratios[0] if ratios else 1)
        self.page_size = -(-least // self._tokens_of_groups) * self._tokens_of_groups

    def layouts(self, cache_format: str, page_size: int) -> list[tuple[CacheFormat, int]]:
        """Each layer's window, and its groups and index keys if it has them."""
        if page_size % self._tokens_of_groups:
            raise ValueError(
                f"page_size must be a multiple of {self._tokens_of_groups}, so that groups end with it, got {page_size}"
            )
        found = []
        for config in self.layers:
            layout = as_format(cache_format, config.head_dim)
            if layout.plain and layout.record_dtype != self.dtype:
                raise ValueError(f"cache_format must be model1 or that of {self.dtype}, got {cache_format!r}")
            found.append((layout, page_size))
            if config.ratio:
                found.append((layout, page_size // config.ratio))
            if config.indexer is not None:
                keys = index_format(index_format_beside(layout), config.indexer.head_dim)
                found.append((keys, page_size // config.ratio))
        return found

    def planner(
        self, cache_format: str, num_pages: int, page_size: int, *, max_requests: int, max_tokens: int
    ) -> Planner:
        return V4Planner(self.layers, page_size, max_requests, self.device, self.backend).plan

    @torch.inference_mode()
    def __call__(
        self, tokens: torch.Tensor, caches: list[torch.Tensor], metadata: V4Metadata, rows: torch.Tensor
    ) -> torch.Tensor:
        embedded = self._body.embed_tokens(tokens)
        hidden = embedded[None, :, None].repeat(1, 1, self._streams, 1)  # [1, T, streams, hidden_size]
        remaining = iter(caches)
        for layer, config, states in zip(self._body.layers, self.layers, metadata.states, strict=True):
            cache = _cache_of(config, remaining, states)
            shares, mixture, seen = layer.attn_hc(hidden)
            seen = layer.input_layernorm(seen)[0]
            attended = attend(layer.self_attn, config, seen, metadata.step, cache, self.backend)[None]
            hidden = _joined_by(shares, mixture, hidden, attended)
            shares, mixture, seen = layer.ffn_hc(hidden)
            # The first layers choose experts by the token itself.
            fed = layer.mlp(layer.post_attention_layernorm(seen), input_ids=tokens[None])
            hidden = _joined_by(shares, mixture, hidden, fed)
        return self._head(self._body.norm(self._body.hc_head(hidden[:, rows]))[0])


class V4Planner:
    """Makes steps of DeepSeek-V4's layers, and keeps the states of requests.

    Args:
        layers: of the model.
        page_size: tokens in a page.
        requests: that states have room for at first; who gave way keeps its place, so that more may come.
        device, backend: of the steps.
    """

    def __init__(
        self, layers: tuple[V4Config, ...], page_size: int, requests: int, device: torch.device, backend: str | None
    ) -> None:
        self._layers, self._page_size, self._device, self._backend = layers, page_size, device, backend
        # A ring of so many pages of ratio tokens for each request: what a group is made of.
        self._rings: dict[int, int] = {}
        for config in layers:
            if config.ratio:
                self._rings[config.ratio] = max(1 + config.overlap, self._rings.get(config.ratio, 0))
        self._room = requests
        self._states = [self._empty_states(config, requests) for config in layers]

    def plan(self, batch: Batch, pad_to: int | None) -> V4Metadata:
        self._make_room(max(batch.places) + 1)
        spans = [(length - count, length) for count, length in zip(batch.counts, batch.lengths, strict=True)]
        table = to_device(batch.page_table(), self._device, torch.int32)
        places = torch.tensor(batch.places, dtype=torch.int32)
        groups, sizes = {}, {}
        for ratio, pages in self._rings.items():
            ring = places[:, None] * pages + torch.arange(pages, dtype=torch.int32)
            groups[ratio] = table, to_device(ring, self._device, torch.int32)
            sizes[ratio] = self._page_size // ratio
        step = V4Step.of_spans(
            spans,
            table,
            groups,
            window=self._layers[0].window,
            page_size=self._page_size,
            group_page_sizes=sizes,
            backend=self._backend,
        )
        return V4Metadata(step, self._states)

    def _make_room(self, requests: int) -> None:
        more = max(requests - self._room, 0)
        if more == 0:
            return
        added = [self._empty_states(config, more) for config in self._layers]
        self._states = [
            (_joined(old[0], new[0]), _joined(old[1], new[1])) for old, new in zip(self._states, added, strict=True)
        ]
        self._room += more

    def _empty_states(self, config: V4Config, requests: int) -> States:
        if not config.ratio:
            return None, None
        pages = requests * self._rings[config.ratio]

        def states(head_dim: int) -> torch.Tensor:
            width = 2 * (1 + config.overlap) * head_dim
            return torch.zeros(pages, config.ratio, width, dtype=torch.float32, device=self._device)

        return states(config.head_dim), None if config.indexer is None else states(config.indexer.head_dim)


def _joined(old: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor | None:
    return None if old is None or new is None else torch.cat((old, new))


def _cache_of(config: V4Config, caches: Iterator[torch.Tensor], states: States) -> V4Cache:
    """A layer's caches, the next of ``allocate``'s."""
    window = next(caches)
    groups = next(caches) if config.ratio else None
    keys = None if config.indexer is None else next(caches)
    return V4Cache(window, groups, states[0], keys, states[1])


def _joined_by(shares: torch.Tensor, mixture: torch.Tensor, hidden: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """What a hyper-connection (DeepSeek-V4's mHC) makes of streams [1, T, n, hidden_size] and the result of a layer.

    The layer saw one mixture of the streams. Each becomes a mixture of all, plus its share of the result.
    """
    mixed = mixture.to(hidden.dtype).transpose(-1, -2) @ hidden
    return mixed + shares.to(hidden.dtype).unsqueeze(-1) * result.unsqueeze(-2)
