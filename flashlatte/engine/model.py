"""A transformers model on flat batches, with this library's attention."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flashlatte import kv_cache
from flashlatte.distributed.model.ranks import Ranks
from flashlatte.distributed.model.shards import divide_mlp, keep_heads
from flashlatte.engine.batch import EngineLimits, StepBatch
from flashlatte.engine.formats import latent_format
from flashlatte.engine.layer_configs import layer_configs, selects_pools, shares_latents
from flashlatte.engine.linear_attention import HybridMetadata, LinearAttention, token_groups
from flashlatte.engine.loading import open_model
from flashlatte.engine.model_types import MODEL_TYPES
from flashlatte.engine.module_attention import ModuleAttention, step_rotation
from flashlatte.engine.paged import PagedModel, Planner, check_type, config_of, is_linear
from flashlatte.engine.pooled_indexer import PooledIndexer, PooledStep
from flashlatte.engine.residuals import Block, residual_of
from flashlatte.engine.text_part import text_config
from flashlatte.kv_cache.index_formats import index_format_beside
from flashlatte.layers import MLAAttention, MLAConfig, MLAMetadata, MLAMetadataBuilder
from flashlatte.layers.fused_projections import fuse_weights_on_gpu
from flashlatte.layers.parts import check_sources, check_weights, hidden_projections, source_layer
from flashlatte.ops.norm_rope import Rotary
from flashlatte.runtime import checks


@dataclass(frozen=True)
class Sublayer:
    """One of the two pairs of a decoder layer of LongCat-Flash (arXiv:2509.01322, §2.2), named as in other models.

    Attributes:
        shortcut: the experts, which read the input of the first pair's MLP; None in the second pair, which adds their
            output.
    """

    input_layernorm: Any
    self_attn: Any
    post_attention_layernorm: Any
    mlp: Any
    shortcut: Any


class Model(PagedModel):
    """An MLA model that computes the logits of a flat batch over paged caches.

    It shares the weights of the transformers model. ``attention`` holds the MLA layers, ``sources`` the index among
    them of the layer whose latents each reads, and ``linear`` the layers of linear attention by their index. With
    several ranks, each has some of the heads and some of the intermediate columns of every MLP (copied from a
    transformers model), and all other weights.

    Args:
        model: a transformers model of one of ``MODEL_TYPES``, also as the language model of a multimodal model, or the
            directory of its checkpoint.
        dtype, device: for a checkpoint's weights; default: the stored dtype, and the rank's GPU if there is one.
        backend: backend of the decode operation; None selects one.
        batch_invariant: whether an engine's results must be bitwise independent of other requests, as far as PyTorch's
            products of one shape are (see the guide); not with an indexer, linear attention or several ranks.
        ranks: ranks that compute it together; None: this process.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        OSError: no checkpoint can be read there, or one of its files is missing.
        TypeError: a model without a head; layers with hooks or a replaced forward, with several ranks also within
            their MLPs; quantized weights of ``kv_b_proj`` from which the matrix cannot be recovered.
        ValueError: a model of another type; a checkpoint with a damaged file, or without some of the model's weights; a
            dtype or device for a loaded model; with several ranks, weights that are quantized in another way than
            float8 with scales, or whose blocks would be split.
    """

    def __init__(
        self,
        model: Any,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        backend: str | None = None,
        batch_invariant: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        if checks.flag("batch_invariant", batch_invariant) and ranks is not None:
            raise ValueError("batch_invariant needs a model on one device: sums over ranks do not promise it")
        whole = config_of(model)
        check_type(config := text_config(whole), MODEL_TYPES)
        self.layers = layer_configs(config)
        self.config = self.layers[0]
        if ranks is not None:
            _check_ranks(whole, config, self.layers, ranks)
        opened = open_model(model, config, dtype, device, ranks)
        model = opened.model
        self.batch_invariant = batch_invariant
        self._decoder_layers = _sublayers(model)
        layers = dict(enumerate(self._decoder_layers))
        self.linear = {n: LinearAttention(layers.pop(n).self_attn) for n in list(layers) if is_linear(model.config, n)}
        self.pooled = {
            n: PooledIndexer(layer.self_attn)
            for n, layer in layers.items()
            if selects_pools(model.config) and layer.self_attn.indexer is not None
        }
        self.has_states, self.has_graphs = len(self.linear) > 0, not (self.linear or self.pooled)
        self._check_eager(config.model_type)
        if ranks is None:
            fuse_weights_on_gpu(hidden_projections(layer.self_attn) for layer in layers.values())
        self.sources = list(range(len(layers)))
        if shares_latents(model.config):
            modules = [layer.self_attn for layer in layers.values()]
            check_sources(modules)
            self.sources = [*map(source_layer, modules)]
        adopt = self._adopt_module if shares_latents(model.config) else self._adopt
        self.attention = [adopt(number, layer, backend, ranks) for number, layer in layers.items()]
        shards = [attention for attention in self.attention if isinstance(attention, MLAAttention)]
        if ranks is not None:
            opened.place(ranks, self.config.num_attention_heads, torch.device(device or ranks.device))
            # Afterwards, because it may replace parameters.
            for attention, layer in zip(shards, layers.values(), strict=True):
                _share_parameters(attention, layer.self_attn)
            fuse_weights_on_gpu(map(hidden_projections, shards))
        first = next(iter(layers.values())).self_attn
        super().__init__(model, first.kv_a_layernorm.weight.device, ranks)
        self.max_position = self.config.rope.max_position
        self._residual = residual_of(model.config)
        self._softcap: float | None = getattr(model.config, "final_logit_softcapping", None)
        self._has_float32_head = getattr(self._head, "weight", None) is not None and (
            self._head.weight.dtype == torch.float32
        )

    def layouts(self, cache_format: str, page_size: int) -> list[tuple[kv_cache.CacheFormat, int]]:
        """The latents of every MLA layer that has its own, then index keys of each layer with an indexer."""
        formats = [latent_format(layer.config, cache_format) for layer in self.attention]
        caches = [formats[number] for number in self._owners()]
        for layer, layout in zip(self.attention, formats, strict=True):
            if layer.indexer is not None and layer.config.indexer is not None:
                caches.append(kv_cache.get_format(index_format_beside(layout), layer.config.indexer.head_dim))
        caches += [kv_cache.get_format(self.plain_format, indexer.state_width) for indexer in self.pooled.values()]
        return [(cache, page_size) for cache in caches]

    def planner(self, cache_format: str, limits: EngineLimits) -> Planner:
        # A page of the scheduler is one page on each rank that stores some of the keys.
        page_size = limits.page_size * self.ranks.kv_ranks
        indexers = [layer.config.indexer for layer in self.attention if layer.indexer is not None]
        builder = MLAMetadataBuilder(
            page_size,
            limits.max_num_seqs,
            max(limits.max_num_batched_tokens, limits.max_num_seqs),
            min(self.max_position, limits.num_pages * page_size),
            self.device,
            cache_format=cache_format,
            num_pages=limits.num_pages,
            topk=indexers[0].topk if indexers and indexers[0] is not None else None,
            windows=sorted({config.window for config in self.layers if config.window is not None}),
        )

        def plan(batch: StepBatch, pad_to: int | None) -> MLAMetadata | HybridMetadata:
            starts = [0, *itertools.accumulate(batch.counts)]
            metadata = builder.build(starts, batch.lengths, batch.page_table(), pad_requests_to=pad_to)
            if self.has_graphs:
                return metadata
            pools = PooledStep.of(batch, page_size, self.device) if self.pooled else None
            return HybridMetadata(metadata, token_groups(batch, self.device) if self.linear else [], pools)

        return plan

    def allocate_states(self, num_slots: int, *, on_host: bool = False) -> list[torch.Tensor]:
        device = torch.device("cpu") if on_host else self.device
        try:
            states = [layer.allocate_states(num_slots, self.dtype, device) for layer in self.linear.values()]
            pairs = itertools.chain.from_iterable(states)
            return [state.pin_memory() for state in pairs] if device != self.device and num_slots else [*pairs]
        except RuntimeError as error:
            memory = "the host's" if device.type == "cpu" else "the GPU's"
            raise ValueError(
                f"max_num_seqs must fit {memory} free memory, got states of linear attention for {num_slots} slots"
            ) from error

    @torch.inference_mode()
    def __call__(
        self,
        tokens: torch.Tensor,
        caches: list[torch.Tensor],
        metadata: MLAMetadata | HybridMetadata,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        streams = self._residual.begin(self._body.embed_tokens(tokens))
        for layer, attend in zip(self._decoder_layers, self._attention_blocks(caches, metadata), strict=True):

            def feed(hidden: torch.Tensor, mlp: Any = layer.mlp) -> torch.Tensor:
                # Mixtures of experts take [batch, tokens, hidden].
                return mlp(hidden[None])[0]

            streams = self._residual.attention(layer, streams, attend)
            streams = self._residual.mlp(layer, streams, feed)
        hidden = self._residual.end(self._body, streams[rows])
        # Hy4's head is float32 in a bf16 model.
        logits = self._head(hidden.float() if self._has_float32_head else hidden)
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap

    def _owners(self) -> list[int]:
        """The MLA layers with latents of their own, by their index among MLA layers."""
        return [number for number, source in enumerate(self.sources) if number == source]

    def _attention_blocks(self, caches: list[torch.Tensor], metadata: MLAMetadata | HybridMetadata) -> Iterator[Block]:
        """The attention of each layer, bound to a step."""
        step = metadata if isinstance(metadata, HybridMetadata) else HybridMetadata(metadata)
        owners = self._owners()
        num_paged = len(owners) + len(self.pooled) + sum(layer.indexer is not None for layer in self.attention)
        latents, index_caches = dict(zip(owners, caches, strict=False)), iter(caches[len(owners) : num_paged])
        layers, states = zip(self.attention, self.sources, strict=True), iter(caches[num_paged:])
        rotary: Rotary | None = None
        for number in range(len(self._decoder_layers)):
            if number in self.linear:
                linear = self.linear[number]
                yield functools.partial(linear, conv=next(states), recurrent=next(states), groups=step.groups)
                continue
            (attention, source), pooled = next(layers), self.pooled.get(number)
            index_cache = next(index_caches) if pooled is not None or attention.indexer is not None else None
            if isinstance(attention, ModuleAttention):
                rotary = rotary or step_rotation(self._body.rotary_emb, step.attention.positions, self.dtype)
                yield functools.partial(
                    attention, cache=latents[source], metadata=step.attention, rotary=rotary, index_cache=index_cache
                )
                continue
            yield functools.partial(
                self._attend, attention, pooled, cache=latents[source], index_cache=index_cache, step=step
            )

    def _attend(
        self,
        attention: MLAAttention,
        pooled: PooledIndexer | None,
        hidden: torch.Tensor,
        *,
        cache: torch.Tensor,
        index_cache: torch.Tensor | None,
        step: HybridMetadata,
    ) -> torch.Tensor:
        if step.pools is None:
            return self.ranks.sum(attention(hidden, cache, step.attention, index_cache=index_cache))
        if pooled is not None and index_cache is not None:
            pooled.select(hidden, index_cache, step.pools)
        return attention(hidden, cache, step.attention, indices=step.pools.selection())

    def _check_eager(self, name: str) -> None:
        """Raise ValueError for options that a model with linear attention or a pooled indexer does not support."""
        if len(self.linear) == len(self.layers):
            raise ValueError(f"layer_types of a {name} must have a layer of MLA, got linear_attention only")
        if self.batch_invariant and not self.has_graphs:
            part = "indexer" if self.pooled else "linear attention"
            raise ValueError(f"batch_invariant must be False for a {name}: PyTorch computes its {part}")

    def _adopt(self, number: int, layer: Any, backend: str | None, ranks: Ranks | None) -> MLAAttention:
        """An attention layer that shares the weights of a decoder layer's module, or this rank's part of them."""
        heads, config = None, self.layers[number]
        if ranks is not None:
            heads = keep_heads(config, layer.self_attn, ranks)
            divide_mlp(layer.mlp, ranks)
        attention = MLAAttention(
            config,
            heads=heads,
            backend=backend,
            batch_invariant=self.batch_invariant,
            shares_selection=config.indexer is not None
            and (number in config.indexer.shared_layers or number in self.pooled),
            device="meta",
        )
        _share_parts(attention, layer.self_attn, ("indexer",) if number in self.pooled else ())
        check_weights(attention, attention.kv_a_layernorm.weight.dtype)
        if not math.isclose(attention.scaling, layer.self_attn.scaling):
            raise ValueError(
                f"scaling of layer {number}'s attention must be {attention.scaling}, as its config has it, got "
                f"{layer.self_attn.scaling}"
            )
        return attention

    def _adopt_module(self, number: int, layer: Any, backend: str | None, ranks: Ranks | None) -> ModuleAttention:
        """A ``ModuleAttention`` that runs a decoder layer's own module."""
        if self.batch_invariant:
            raise ValueError("batch_invariant must be False for a model with an indexer, got True")
        return ModuleAttention(layer.self_attn, self.layers[number], backend)


def _check_ranks(whole: Any, config: Any, layers: Sequence[MLAConfig], ranks: Ranks) -> None:
    """Raise ValueError for a model that several ranks cannot compute together.

    Args:
        whole, config: config of the model, and of its language model.
    """
    reasons = {
        "whose layers share latents": shares_latents(config),
        "whose layers have different heads": len(set(layers)) > 1,
        "whose layers of linear attention are not divided": any(is_linear(config, n) for n in range(len(layers))),
        "whose indexer of pools is not divided": selects_pools(config),
        "which is a part of another model": whole is not config,
        "whose decoder layers have two attentions": config.model_type == "longcat_flash",
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"tensor_parallel must be 1 for a {config.model_type}, {reason}, got {ranks.size}")
    if ranks.kv_ranks > 1 and layers[0].attn_sink:
        raise ValueError(
            f"context_parallel must be 1 for a {config.model_type}: attention sinks need the whole cache on each "
            f"rank, got {ranks.kv_ranks}"
        )


def _share_parameters(layer: nn.Module, module: nn.Module) -> None:
    """Replace a layer's own parameters by those of a transformers module.

    Raises:
        TypeError: the module has others.
    """
    names = {name for name, _ in layer.named_parameters(recurse=False)}
    found = {name for name, _ in module.named_parameters(recurse=False)}
    if names != found:
        raise TypeError(
            f"{type(module).__name__} must have the parameters {', '.join(sorted(names)) or 'of its parts only'}, got "
            f"{', '.join(sorted(found)) or 'no others'}"
        )
    for name in names:
        setattr(layer, name, getattr(module, name))


def _share_parts(layer: nn.Module, module: nn.Module, others: Collection[str] = ()) -> None:
    """Replace a layer's projections and norms by those of a transformers module, of any type.

    Args:
        others: further parts that the module must have.

    Raises:
        TypeError: the module has other parts.
    """
    _share_parameters(layer, module)
    names = dict(layer.named_children()).keys()
    if names | {*others} != (found := dict(module.named_children()).keys()):
        raise TypeError(f"{type(module).__name__} must have the parts {', '.join(names)}, got {', '.join(found)}")
    for name, part in list(layer.named_children()):
        shared = module.get_submodule(name)
        if list(part.children()):
            _share_parts(part, shared)
        else:
            setattr(layer, name, shared)


def _sublayers(model: Any) -> list[Any]:
    """The decoder layers of a transformers model, or the pairs in them if they have several."""
    found = []
    for layer in model.model.layers:
        if not isinstance(layer.self_attn, nn.ModuleList):
            found.append(layer)
            continue
        for index, parts in enumerate(
            zip(layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlps, strict=True)
        ):
            found.append(Sublayer(*parts, layer.mlp if index == 0 else None))
    return found
