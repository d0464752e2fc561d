"""``MLAAttention``: the layer between a model's hidden states and the attention kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flashlatte.kv_cache import CacheFormat
from flashlatte.kv_cache.codec import as_cache
from flashlatte.layers import checkpoint
from flashlatte.layers.absorbed import up_projections
from flashlatte.layers.cache import LatentCache
from flashlatte.layers.config import MLAConfig
from flashlatte.layers.forward import forward, hidden_projections
from flashlatte.layers.indexer import Indexer, Indexing, make_indexing
from flashlatte.layers.metadata import MLAMetadata
from flashlatte.layers.products import linear
from flashlatte.layers.rope import number, numbered_table
from flashlatte.layers.side_by_side import lay_side_by_side
from flashlatte.layers.weights import own_matrix
from flashlatte.ops.norm_rope.rotary import Rotary
from flashlatte.runtime import checks, dispatch, gradients


class MLAAttention(nn.Module):
    """Multi-head Latent Attention over a paged cache: prefill in multi-head form, decode absorbed, in one batch.

    Parameters have transformers' names. For inference: no gradient flows through it, and the first call that records
    gradients of its input or a parameter warns (``requires_grad`` of new parameters is False). With an indexer in the
    config, a token attends to what the indexer selects (DeepSeek-V3.2's sparse attention).

    Args:
        config: sizes of the whole layer.
        heads: (first, last): only heads ``first`` to ``last`` - 1, a tensor-parallel shard. Its output is a partial
            one: those of all shards sum to the layer's. The part of each token that all heads share (the latent) is
            computed, and cached, by every shard.
        backend: of the operations that read the cache: "hopper", "portable" or "reference"; None chooses.
        batch_invariant: make decode attention of a request independent, bit for bit, of what else is in a step whose
            requests have as many new tokens each. Projections are PyTorch's, whose bits may depend on the number of
            tokens. For layers without an indexer, over whole caches.
        shares_selection: attend to what the layer before it selected, without an indexer of its own
            (``config.indexer.shared_layers`` has the numbers of such layers).
        dtype, device: of the parameters, which are not initialised.

    Raises:
        TypeError, ValueError: a head range that the layer does not have, an unknown backend, or a selection to share
            without an indexer in the config, ``batch_invariant`` beside one.
    """

    def __init__(
        self,
        config: MLAConfig,
        *,
        heads: tuple[int, int] | None = None,
        backend: str | None = None,
        batch_invariant: bool = False,
        shares_selection: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, MLAConfig):
            raise TypeError(f"config must be an MLAConfig, got {type(config).__name__}")
        device = checks.device("device", device)
        if heads is None:
            heads = (0, config.num_attention_heads)
        if not isinstance(heads, Sequence) or [type(head) for head in heads] != [int, int]:
            raise TypeError(f"heads must be a pair of ints (first, last), got {heads!r}")
        first, last = heads
        if not 0 <= first < last <= config.num_attention_heads:
            raise ValueError(
                f"heads must be a range within the layer's {config.num_attention_heads} heads, got {heads}"
            )
        if backend is not None:
            checks.choice("backend", backend, dispatch.backends())
        if checks.flag("shares_selection", shares_selection) and config.indexer is None:
            raise ValueError("shares_selection needs a config with an indexer, got indexer None")
        if checks.flag("batch_invariant", batch_invariant) and config.indexer is not None:
            raise ValueError("batch_invariant needs a config without an indexer, whose selection does not promise it")
        self.config = config
        self.batch_invariant = batch_invariant
        self.heads = (first, last)
        self.backend = backend
        self.q_lora_rank = config.q_lora_rank
        self.kv_lora_rank = config.kv_lora_rank
        self.qk_nope_head_dim = config.qk_nope_head_dim
        self.qk_rope_head_dim = config.qk_rope_head_dim
        self.v_head_dim = config.v_head_dim
        self.scaling = config.softmax_scale
        self._rope_number = number(config.rope, config.qk_rope_head_dim)
        # transformers' names in LongCat-Flash's attention.
        self.mla_scale_q_lora, self.mla_scale_kv_lora = config.query_factor, config.latent_factor

        count, hidden, bias = last - first, config.hidden_size, config.attention_bias
        if config.q_lora_rank is None:
            self.q_proj = linear(hidden, count * config.qk_head_dim, dtype, device)
        else:
            self.q_a_proj = linear(hidden, config.q_lora_rank, dtype, device, bias=bias)
            self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, config.norm_eps, dtype=dtype, device=device)
            self.q_b_proj = linear(config.q_lora_rank, count * config.qk_head_dim, dtype, device)
        self.kv_a_proj_with_mqa = linear(hidden, config.head_dim, dtype, device, bias=bias)
        self.kv_a_layernorm = nn.RMSNorm(config.kv_lora_rank, config.norm_eps, dtype=dtype, device=device)
        self.kv_b_proj = linear(
            config.kv_lora_rank, count * (config.qk_nope_head_dim + config.v_head_dim), dtype, device
        )
        # A bias is added once: by the first shard.
        self.o_proj = linear(count * config.v_head_dim, hidden, dtype, device, bias=bias and first == 0)
        self.indexer = None
        if config.indexer is not None and not shares_selection and config.q_lora_rank is not None:
            self.indexer = Indexer(config.indexer, hidden, config.q_lora_rank, dtype=dtype, device=device)
        self.requires_grad_(False)
        lay_side_by_side(*hidden_projections(self))

    def _apply(self, fn: Any, recurse: bool = True) -> MLAAttention:
        # Moved or cast, each parameter lies by itself.
        super()._apply(fn, recurse)
        lay_side_by_side(*hidden_projections(self))
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Another process gives other numbers.
        self._rope_number = number(self.config.rope, self.qk_rope_head_dim)
        # A copy has each parameter by itself.
        lay_side_by_side(*hidden_projections(self))

    @property
    def w_uk(self) -> torch.Tensor:
        """W_UK [h, nope, latent], a view of kv_b_proj's weight, so that there is one copy, which follows updates.

        Where that is quantised, of the matrix that it stands for.
        """
        return self._up_projections()[0]

    @property
    def w_uv(self) -> torch.Tensor:
        """W_UV [h, v, latent], a view likewise."""
        return self._up_projections()[1]

    def _up_projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        kv_b = own_matrix(self, "kv_b_proj", self.kv_a_layernorm.weight.dtype)
        return up_projections(kv_b, self.qk_nope_head_dim, self.v_head_dim)

    def load_weights(self, weights: Mapping[str, torch.Tensor], *, ignore: Sequence[str] = ()) -> None:
        """Copy weights in, by transformers' names below ``self_attn`` ("q_a_proj.weight", …), of the whole layer.

        A shard takes its heads' part. Float8 weights with a ``weight_scale_inv`` of 128 x 128 blocks beside them, as
        in DeepSeek-V3's checkpoints, are dequantised.

        Args:
            ignore: patterns (``*`` and ``?``) of names that may be there and that the layer has no use for. The
                indexer of DeepSeek-V3.2 is ``"indexer.*"``: a layer whose config has none attends to every token,
                unless its forward pass is given ``indices``.

        Raises:
            ValueError: a weight is missing, has another shape, or is one that the layer has no use for; names all that
                are wrong.
        """
        checkpoint.load_weights(self, self.config, self.heads, weights, ignore)

    def load_checkpoint(self, path: str | Path, layer: int, *, ignore: Sequence[str] = ()) -> None:
        """Load a layer of a DeepSeek-V2, V3 or V3.2 checkpoint, as ``load_weights`` does.

        Args:
            path: a safetensors file, or a directory with such files.
            layer: its number in the model, from 0.
            ignore: as for ``load_weights``.

        Raises:
            FileNotFoundError, ModuleNotFoundError, ValueError: nothing to read, safetensors not installed, or as
                ``load_weights``.
        """
        self.load_weights(checkpoint.read_layer(path, layer), ignore=ignore)

    def forward(
        self,
        hidden: torch.Tensor,
        cache: torch.Tensor,
        metadata: MLAMetadata,
        *,
        cache_format: str | CacheFormat | None = None,
        k_scale: float | torch.Tensor | None = None,
        indices: torch.Tensor | None = None,
        index_cache: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of a flat batch; its tokens' latents, and index keys, go into the caches.

        Args:
            hidden: [tokens, hidden_size], tokens of decode requests first.
            cache: [pages, page_size, 1, width], this layer's.
            metadata: of the step, as ``MLAMetadataBuilder`` makes it.
            cache_format: inferred from the cache if None.
            k_scale: the scale of format ``fp8``.
            indices: int32 or int64 [tokens, topk], slots that each token attends to (sparse attention, not with
                ``fp8``), which must be of its request's tokens up to its own; others select nothing. None: what the
                indexer selects, or all.
            index_cache: [pages, page_size, 1, width] of ``index_fp8``, ``index_bf16``, ``index_fp32`` or
                ``index_mxfp4``: this layer's index keys, with pages and slots as ``cache``; for a layer with an
                indexer, and only there.

        Returns:
            [tokens, hidden_size]; of a shard, its part of the sum.

        Raises:
            TypeError, ValueError: arguments of a wrong type, dtype, shape or device, or that contradict each other.
        """
        config = self.config
        dtype, device = self.kv_a_layernorm.weight.dtype, self.kv_a_layernorm.weight.device
        if not isinstance(metadata, MLAMetadata):
            raise TypeError(f"metadata must be an MLAMetadata, got {type(metadata).__name__}")
        checks.tensor("hidden", hidden, (metadata.num_tokens, config.hidden_size), (dtype,), device)
        pages, layout = as_cache(cache, cache_format)
        self._check_cache(pages, layout, k_scale)
        _check_same_cache(metadata, pages)
        self._check_selection(metadata, layout, indices)
        if self.batch_invariant and metadata.sharding is not None:
            raise ValueError(f"batch_invariant needs a whole cache, got metadata for {metadata.sharding}")
        if metadata.max_seq_len > config.rope.max_position:
            raise ValueError(
                f"metadata has a request of {metadata.max_seq_len} tokens, and the config's rope.max_position is "
                f"{config.rope.max_position}"
            )
        if indices is not None:
            checks.tensor("indices", indices, (metadata.num_tokens, "topk"), checks.INDEX_DTYPES, device)
        if metadata.num_tokens == 0:
            return torch.empty_like(hidden)
        cosines_and_sines = numbered_table(self._rope_number, device)
        rotary = Rotary(cosines_and_sines, metadata.positions, config.rope.layout == "interleaved")
        latents = LatentCache(pages, layout, config.kv_lora_rank, k_scale)
        indexing = self._indexing(index_cache, pages, rotary)
        scaling = config.query_scaling
        gradients.warn_if_layer_drops("MLAAttention", self, hidden)
        with torch.no_grad():
            return forward(
                self,
                hidden,
                latents,
                metadata,
                rotary,
                indices=indices,
                indexing=indexing,
                query_factors=None if scaling is None else scaling.factors(metadata.positions),
                backend=self.backend,
                batch_invariant=self.batch_invariant,
            )

    def _indexing(self, index_cache: torch.Tensor | None, pages: torch.Tensor, rotary: Rotary) -> Indexing | None:
        config = self.config.indexer
        if (self.indexer is None) != (index_cache is None):
            has = "no indexer" if self.indexer is None else "an indexer"
            raise ValueError(f"index_cache must be given to a layer with an indexer, and only there: this has {has}")
        if self.indexer is None or index_cache is None or config is None:
            return None
        return make_indexing(self.indexer, config, index_cache, pages, rotary, self.backend)

    def _check_selection(self, metadata: MLAMetadata, layout: CacheFormat, indices: torch.Tensor | None) -> None:
        """A step that was planned for another choice would attend to other tokens, and no kernel could tell."""
        selection, config = metadata.selection, self.config.indexer
        topk = None if selection is None else selection.topk
        if indices is None and topk != (None if config is None else config.topk):
            wanted = "None, as the layer has no indexer" if config is None else f"the indexer's {config.topk}"
            raise ValueError(f"metadata must be built for topk {wanted}, got {topk}: MLAMetadataBuilder(topk=…)")
        if indices is not None and metadata.sharding is not None:
            raise ValueError("indices are slots of a whole cache, and metadata is for a rank's part of one")
        if selection is None or indices is not None:
            return
        if selection.slots is not None and layout.takes_scale:
            raise ValueError(f"cache of format {layout.name} cannot be read token by token, as an indexer needs it")
        if self.indexer is None and not selection.made:
            raise ValueError("metadata has no selection to share yet: a layer with an indexer must run before this one")

    def _check_cache(self, pages: torch.Tensor, layout: CacheFormat, k_scale: float | torch.Tensor | None) -> None:
        config = self.config
        if pages.device != self.kv_a_layernorm.weight.device:
            raise ValueError(
                f"cache must be on {self.kv_a_layernorm.weight.device} like the weights, got {pages.device}"
            )
        if layout.head_dim != config.head_dim or (not layout.plain and layout.rope_dim != config.qk_rope_head_dim):
            raise ValueError(
                f"cache of format {layout.name} has rows of {layout.head_dim}, and the layer's are kv_lora_rank "
                f"{config.kv_lora_rank} and qk_rope_head_dim {config.qk_rope_head_dim}"
            )
        if k_scale is not None and not layout.takes_scale:
            raise ValueError(f"k_scale belongs to cache format fp8, got {layout.name}")


def _check_same_cache(metadata: MLAMetadata, pages: torch.Tensor) -> None:
    """Pages and slots mean something else in a cache of other pages, or in another step, and no kernel could tell."""
    # A compiled layer would be compiled again for each number.
    if not torch.compiler.is_compiling():
        if metadata.is_overwritten:
            raise ValueError("metadata must be the last that its builder built, whose buffers hold another step by now")
        if metadata.pages_reached > pages.shape[0]:
            raise ValueError(
                f"metadata has a request or a slot in page {metadata.pages_reached - 1}, and the cache has "
                f"{pages.shape[0]} pages"
            )
    if metadata.page_size != pages.shape[1]:
        raise ValueError(
            f"metadata was built for pages of {metadata.page_size} tokens, and the cache has pages of {pages.shape[1]}"
        )
    if metadata.num_pages is not None and metadata.num_pages > pages.shape[0]:
        raise ValueError(f"metadata was built for {metadata.num_pages} pages, and the cache has {pages.shape[0]}")
    if metadata.positions.device != pages.device:
        raise ValueError(f"metadata must be on {pages.device} like the cache, got {metadata.positions.device}")
