"""Attention of Mistral Large 4: transformers' modules over paged caches.

``MLAAttention`` cannot represent these layers: the RoPE frequencies are a parameter of the model, each layer has a
learned factor of queries, and some layers read the latents of an earlier layer.
"""

from __future__ import annotations

from typing import Any

import torch

from flashlatte.kv_cache.codec import as_cache
from flashlatte.layers import MLAConfig, MLAMetadata
from flashlatte.layers.cache import LatentCache
from flashlatte.layers.forward import forward
from flashlatte.layers.indexer import make_step_indexer
from flashlatte.layers.parts import check_parts, check_weights, head_factors
from flashlatte.layers.rope import unrotated_table
from flashlatte.ops.norm_rope import Rotary


class ModuleAttention:
    """An attention module on flat batches.

    Args:
        module: transformers' ``MistralLarge4TextAttention``.
        config: config of the layer.
        backend: backend of the operations that read the cache; None selects one.

    Attributes:
        indexer: the module's indexer; None for a module that shares the selection of the layer before.

    Raises:
        TypeError: a module with other parts than MLA's, or quantized weights from which the matrix cannot be recovered.
    """

    def __init__(self, module: Any, config: MLAConfig, backend: str | None) -> None:
        check_parts(module)
        check_weights(module, module.o_proj.weight.dtype)
        self.module, self.config, self.indexer, self._backend = module, config, module.indexer, backend

    def __call__(
        self,
        hidden: torch.Tensor,
        cache: torch.Tensor,
        metadata: MLAMetadata,
        *,
        rotary: Rotary,
        index_cache: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of hidden states [T, hidden_size]; stores their latents and index keys, if the layer has any.

        Args:
            cache: [pages, page_size, 1, width], latents of the layer, or of the one whose latents it reads.
            rotary: rotation of the T tokens in the layers that rotate.
            index_cache: [pages, page_size, 1, width], index keys of a layer with an indexer.
        """
        module, positions = self.module, metadata.positions
        pages, layout = as_cache(cache, None, rows=(module.kv_lora_rank, module.qk_rope_head_dim))
        if not module.qk_rope_head_dim:
            rotary = Rotary(unrotated_table(0, hidden.device), positions, interleaved=False)
        indexer = None
        if index_cache is not None and self.config.indexer is not None:
            indexer = make_step_indexer(
                self.indexer, self.config.indexer, index_cache, pages, rotary, self._backend, positions
            )
        return forward(
            module,
            hidden,
            LatentCache(pages, layout, module.kv_lora_rank),
            metadata,
            rotary,
            indexer=indexer,
            query_factors=head_factors(module.softmax_scaling, positions, hidden.dtype),
            backend=self._backend,
        )


def step_rotation(embedding: Any, positions: torch.Tensor, dtype: torch.dtype) -> Rotary:
    """The rotation of tokens at positions [T] by transformers' rotary embedding of a model in ``dtype``.

    It is computed in each step, so that it follows the parameters of the embedding, and so that no table for a million
    positions is needed.
    """
    like = torch.empty(0, dtype=dtype, device=positions.device)
    cosines, sines = (x[0, :, : x.shape[-1] // 2].float() for x in embedding(like, position_ids=positions[None]))
    rows = torch.arange(positions.shape[0], device=positions.device)
    return Rotary(torch.cat((cosines, sines), dim=-1), rows, interleaved=True)
