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
from flashlatte.layers.absorbed import check_precision, up_projections
from flashlatte.layers.cache import LatentCache
from flashlatte.layers.config import MLAConfig
from flashlatte.layers.forward import forward
from flashlatte.layers.fused_projections import fuse_weights, linear
from flashlatte.layers.indexer import Indexer, StepIndexer, make_step_indexer
from flashlatte.layers.metadata import MLAMetadata
from flashlatte.layers.parts import hidden_projections
from flashlatte.layers.rope import rotary_table, table_id
from flashlatte.layers.training import TrainingOutput, attend
from flashlatte.layers.training_batch import Rotation, TrainingBatch, check_sequences
from flashlatte.layers.training_ranks import TrainingRanks
from flashlatte.layers.weights import linear_weight
from flashlatte.ops.norm_rope import Rotary
from flashlatte.runtime import checks, dispatch, gradients


class MLAAttention(nn.Module):
    """Multi-head Latent Attention over a paged cache. A batch may mix prefill (multi-head) and decode (absorbed).

    Parameters have transformers' names. No gradient flows through ``forward``: the first call that would record
    gradients of its input or of a parameter warns (``requires_grad`` of new parameters is False). ``forward_training``
    has gradients. If the config has an indexer, a token attends to the tokens that the indexer selects (DeepSeek-V3.2's
    sparse attention).

    Args:
        config: sizes of the whole layer.
        heads: (first, last): create only heads ``first`` to ``last`` - 1, a tensor-parallel shard. The output of a
            shard is partial: the sum over all shards is the layer's output. Every shard computes and caches the
            latent, which all heads share.
        backend: backend of the operations that read the cache: "hopper", "portable" or "reference"; None selects one.
        batch_invariant: make decode attention of a request bitwise independent of the other requests of a step, if
            all have the same number of new tokens. Projections are PyTorch's, and may depend on the number of tokens.
            Only for layers without an indexer, over whole caches.
        decode_precision: "fp8" multiplies in e4m3 in decode over a cache of format ``fp8`` (``precision`` of
            ``dense_decode``), which is faster on Hopper with many requests and less exact (docs/guide/numerics.md).
            Prefill does not change. Only for layers without an indexer, window or attention sink, and unsharded caches
            of this format. None: exact products.
        shares_selection: reuse the selection of the layer before; this layer has no indexer
            (``config.indexer.shared_layers`` lists such layers).
        dtype, device: dtype and device of the parameters, which are not initialized.

    Raises:
        TypeError, ValueError: a head range outside of the layer, an unknown backend or precision, ``shares_selection``
            without an indexer in the config, ``batch_invariant`` with one, ``decode_precision`` for a config whose
            decode has no such form.
    """

    def __init__(
        self,
        config: MLAConfig,
        *,
        heads: tuple[int, int] | None = None,
        backend: str | None = None,
        batch_invariant: bool = False,
        decode_precision: str | None = None,
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
            raise ValueError("batch_invariant needs a config without an indexer: its selection is not batch-invariant")
        check_precision(decode_precision, config)
        self.config = config
        self.batch_invariant = batch_invariant
        self.decode_precision = decode_precision
        self.heads = (first, last)
        self.backend = backend
        self.q_lora_rank = config.q_lora_rank
        self.kv_lora_rank = config.kv_lora_rank
        self.qk_nope_head_dim = config.qk_nope_head_dim
        self.qk_rope_head_dim = config.qk_rope_head_dim
        self.v_head_dim = config.v_head_dim
        self.scaling = config.softmax_scale
        self._rope_table_id = table_id(config.rope, config.qk_rope_head_dim)
        # transformers' names in LongCat-Flash's attention.
        self.mla_scale_q_lora, self.mla_scale_kv_lora = config.query_factor, config.latent_factor

        count, hidden, bias = last - first, config.hidden_size, config.attention_bias
        if config.q_lora_rank is None:
            self.q_proj = linear(hidden, count * config.qk_head_dim, dtype, device)
        else:
            self.q_a_proj = linear(hidden, config.q_lora_rank, dtype, device, bias=bias)
            self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, config.norm_eps, dtype=dtype, device=device)
            if config.output_gate == "query":
                width = count * (config.qk_head_dim + config.v_head_dim)
                self.q_gate_proj = linear(2 * config.q_lora_rank, width, dtype, device)
            else:
                self.q_b_proj = linear(config.q_lora_rank, count * config.qk_head_dim, dtype, device)
        self.kv_a_proj_with_mqa = linear(hidden, config.head_dim, dtype, device, bias=bias)
        self.kv_a_layernorm = nn.RMSNorm(config.kv_lora_rank, config.norm_eps, dtype=dtype, device=device)
        self.kv_b_proj = linear(
            config.kv_lora_rank, count * (config.qk_nope_head_dim + config.v_head_dim), dtype, device
        )
        if config.key_rope_norm:
            self.k_rope_only_layernorm = nn.RMSNorm(
                config.qk_rope_head_dim, config.norm_eps, dtype=dtype, device=device
            )
        if config.output_gate == "head":
            self.g_proj = linear(hidden, count, dtype, device)
        elif config.output_gate == "channel":
            self.gate_proj = linear(hidden, count * config.v_head_dim, dtype, device)
        if config.attn_sink:
            self.sinks = nn.Parameter(torch.empty(count, dtype=torch.float32, device=device))
        # The shards' outputs are summed, so only the first shard adds the bias.
        self.o_proj = linear(count * config.v_head_dim, hidden, dtype, device, bias=bias and first == 0)
        self.indexer = None
        if config.indexer is not None and not shares_selection:
            self.indexer = Indexer(config.indexer, hidden, config.q_lora_rank, dtype=dtype, device=device)
        self.requires_grad_(False)
        fuse_weights(*hidden_projections(self))

    def _apply(self, fn: Any, recurse: bool = True) -> MLAAttention:
        # Moving or casting gives each parameter its own storage.
        super()._apply(fn, recurse)
        fuse_weights(*hidden_projections(self))
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Table ids are local to a process.
        self._rope_table_id = table_id(self.config.rope, self.qk_rope_head_dim)
        # In a copy, each parameter has its own storage.
        fuse_weights(*hidden_projections(self))

    @property
    def w_uk(self) -> torch.Tensor:
        """W_UK [h, nope, latent], a view of kv_b_proj's weight, or of its dequantized weight."""
        return self._up_projections()[0]

    @property
    def w_uv(self) -> torch.Tensor:
        """W_UV [h, v, latent], a view of the same weight."""
        return self._up_projections()[1]

    def _up_projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        kv_b = linear_weight(self, "kv_b_proj", self.kv_a_layernorm.weight.dtype)
        return up_projections(kv_b, self.qk_nope_head_dim, self.v_head_dim)

    def load_weights(self, weights: Mapping[str, torch.Tensor], *, ignore: Sequence[str] = ()) -> None:
        """Copy the whole layer's weights, by transformers' names below ``self_attn`` ("q_a_proj.weight", …).

        A shard keeps the part of its heads. Float8 weights with a ``weight_scale_inv`` of 128 x 128 blocks, as in
        DeepSeek-V3's checkpoints, are dequantized.

        Args:
            ignore: patterns (``*`` and ``?``) of weights to skip. ``"indexer.*"`` skips the indexer of DeepSeek-V3.2:
                a layer without one attends to every token, unless its forward pass is given ``indices``.

        Raises:
            ValueError: weights that are missing, have another shape, or are unknown to the layer; names all of them.
        """
        checkpoint.load_weights(self, self.config, self.heads, weights, ignore)

    def load_checkpoint(self, path: str | Path, layer: int, *, ignore: Sequence[str] = ()) -> None:
        """Load a layer of a DeepSeek-V2, V3 or V3.2 checkpoint, as ``load_weights`` does.

        Args:
            path: a safetensors file, or a directory with such files.
            layer: index of the layer in the model, from 0.
            ignore: as for ``load_weights``.

        Raises:
            FileNotFoundError: no safetensors file.
            ModuleNotFoundError: safetensors is not installed.
            ValueError: as ``load_weights``.
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
        """Attention of a flat batch. Stores the latents, and index keys, of its tokens in the caches.

        Args:
            hidden: [tokens, hidden_size], tokens of decode requests first.
            cache: [pages, page_size, 1, width], the cache of this layer.
            metadata: metadata of the step from ``MLAMetadataBuilder.build``.
            cache_format: inferred from the cache and the config if None.
            k_scale: the scale of format ``fp8``.
            indices: int32 or int64 [tokens, topk], slots that each token attends to (sparse attention, not with
                ``fp8``). They must belong to tokens of the same request up to the token itself; other values select
                nothing. None: the indexer's selection, or all tokens.
            index_cache: [pages, page_size, 1, width] of ``index_fp8``, ``index_bf16``, ``index_fp32`` or
                ``index_mxfp4``: the index keys of this layer, with the pages and slots of ``cache``. Required for a
                layer with an indexer, None for others.

        Returns:
            [tokens, hidden_size]; for a shard, its summand.

        Raises:
            TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
        """
        config = self.config
        dtype, device = self.kv_a_layernorm.weight.dtype, self.kv_a_layernorm.weight.device
        if not isinstance(metadata, MLAMetadata):
            raise TypeError(f"metadata must be an MLAMetadata, got {type(metadata).__name__}")
        checks.tensor("hidden", hidden, (metadata.num_tokens, config.hidden_size), (dtype,), device)
        pages, layout = as_cache(cache, cache_format, rows=(config.kv_lora_rank, config.qk_rope_head_dim))
        self._check_cache(pages, layout, k_scale)
        metadata.check_cache(pages)
        self._check_selection(metadata, layout, indices)
        for option in ("batch_invariant", "decode_precision"):
            if metadata.sharding is not None and getattr(self, option):
                raise ValueError(f"{option} needs a whole cache, got metadata for {metadata.sharding}")
        if metadata.max_seq_len > config.rope.max_position:
            raise ValueError(
                f"metadata has a request of {metadata.max_seq_len} tokens, and the config's rope.max_position is "
                f"{config.rope.max_position}"
            )
        if config.window is not None:
            indices = self._window(metadata, indices)
        elif indices is not None:
            checks.tensor("indices", indices, (metadata.num_tokens, "topk"), checks.INDEX_DTYPES, device)
        if metadata.num_tokens == 0:
            return torch.empty_like(hidden)
        cosines_and_sines = rotary_table(self._rope_table_id, device)
        rotary = Rotary(cosines_and_sines, metadata.positions, config.rope.layout == "interleaved")
        latents = LatentCache(pages, layout, config.kv_lora_rank, k_scale)
        step_indexer = self._step_indexer(index_cache, pages, rotary)
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
                indexer=step_indexer,
                query_factors=None if scaling is None else scaling.factors(metadata.positions),
                backend=self.backend,
                batch_invariant=self.batch_invariant,
                decode_precision=self.decode_precision,
            )

    def forward_training(
        self,
        hidden: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        *,
        indices: torch.Tensor | None = None,
        dense: bool = False,
        ranks: TrainingRanks | None = None,
    ) -> TrainingOutput:
        """Causal attention of packed sequences without a cache, with gradients of the input and of the parameters.

        Attention is in multi-head form (``dense_prefill``), or, if the layer's config has an indexer and a sequence may
        have more tokens than it selects, over the selected tokens in absorbed form (``sparse_attention``). The indexer
        is trained by its loss alone, which has gradients of the indexer's parameters only. A token's position is its
        index in its sequence. Backends are selected automatically.

        Args:
            hidden: [tokens, hidden_size] in the parameters' dtype, or any dtype under autocast.
            cu_seqlens: int32 or int64 [n + 1], boundaries of the sequences, from 0.
            max_seqlen: tokens of the longest sequence.
            indices: the selection of the layer before, from its output, for a layer with ``shares_selection``.
            dense: attend to every token although the layer has an indexer, which then trains on all tokens (the
                warm-up).
            ranks: a ``distributed.ContextShard`` of the batch that cu_seqlens describes: hidden, indices and results
                are of its tokens, and a parameter's gradients are the terms of a sum over ranks.

        Returns:
            The layer's output [tokens, hidden_size] (for a shard of heads, its summand), the loss of its indexer, and
            its selection, as indices of the batch's tokens. Without ranks, the target of a shard's loss is the mean
            over the shard's heads.

        Raises:
            TypeError, ValueError: an argument of the wrong type, dtype, shape or device; ranks whose arguments differ.
        """
        config, weight = self.config, self.kv_a_layernorm.weight
        dtypes = checks.FLOAT_DTYPES if torch.is_autocast_enabled(weight.device.type) else (weight.dtype,)
        checks.tensor("hidden", hidden, ("tokens", config.hidden_size), dtypes, weight.device)
        tokens = hidden.shape[0]
        checks.tensor("cu_seqlens", cu_seqlens, ("n + 1",), checks.INDEX_DTYPES, weight.device)
        batch_tokens = tokens if ranks is None or ranks.tokens is None else ranks.tokens
        check_sequences(cu_seqlens, max_seqlen, batch_tokens, config.rope.max_position)
        if indices is not None:
            checks.tensor("indices", indices, (tokens, 1, "topk"), checks.INDEX_DTYPES, weight.device)
            if config.indexer is None or self.indexer is not None:
                raise ValueError("indices must be None for a layer that does not share a selection, got a tensor")
        batch = TrainingBatch.of_ranks(cu_seqlens, max_seqlen, tokens, ranks)
        positions = (batch.key_end - 1 - batch.key_start).clamp_(0, config.rope.max_position - 1)
        rotation = Rotation.at(rotary_table(self._rope_table_id, weight.device), positions, config.rope.layout)
        return attend(
            self,
            hidden,
            batch,
            rotation,
            indexer=self.indexer,
            config=config.indexer,
            indices=indices,
            window=config.window,
            query_factors=None if config.query_scaling is None else config.query_scaling.factors(positions),
            dense=checks.flag("dense", dense),
            ranks=ranks,
        )

    def _step_indexer(
        self, index_cache: torch.Tensor | None, pages: torch.Tensor, rotary: Rotary
    ) -> StepIndexer | None:
        config = self.config.indexer
        if (self.indexer is None) != (index_cache is None):
            has = "no indexer" if self.indexer is None else "an indexer"
            raise ValueError(f"index_cache must be given if and only if the layer has an indexer: this layer has {has}")
        if self.indexer is None or index_cache is None or config is None:
            return None
        return make_step_indexer(self.indexer, config, index_cache, pages, rotary, self.backend)

    def _window(self, metadata: MLAMetadata, indices: torch.Tensor | None) -> torch.Tensor:
        """The slots that a layer with a window attends to."""
        if indices is not None:
            raise ValueError("indices must be None for a layer with a window")
        if metadata.sharding is not None:
            raise ValueError(f"a layer with a window needs a whole cache, got metadata for {metadata.sharding}")
        slots = metadata.windows.get(self.config.window or 0)
        if slots is None:
            raise ValueError(
                f"metadata must be built with the layer's window {self.config.window}: MLAMetadataBuilder(windows=…), "
                f"got {sorted(metadata.windows)}"
            )
        return slots

    def _check_selection(self, metadata: MLAMetadata, layout: CacheFormat, indices: torch.Tensor | None) -> None:
        """Check that the step was built for this selection; otherwise kernels would silently attend to other tokens."""
        if self.config.window is not None:
            return
        selection, config = metadata.selection, self.config.indexer
        topk = None if selection is None else selection.topk
        if indices is None and topk != (None if config is None else config.topk):
            expected = "None, as the layer has no indexer" if config is None else f"the indexer's {config.topk}"
            raise ValueError(f"metadata must be built for topk {expected}, got {topk}: MLAMetadataBuilder(topk=…)")
        if indices is not None and metadata.sharding is not None:
            raise ValueError("indices must be None with sharded metadata: they are slots of a whole cache")
        if selection is None or indices is not None:
            return
        if selection.slots is not None and layout.takes_scale:
            raise ValueError(f"cache of format {layout.name} cannot be read token by token, which an indexer requires")
        if self.indexer is None and not selection.is_filled:
            raise ValueError("metadata has no selection yet: a layer with an indexer must run before this one")

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
        if self.decode_precision is not None and not layout.takes_scale:
            raise ValueError(
                f"decode_precision={self.decode_precision!r} needs a cache of format fp8, got {layout.name}"
            )
