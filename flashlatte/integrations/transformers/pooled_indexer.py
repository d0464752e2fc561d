"""Selection by the model's own indexer over pools of tokens (GLM-5.3-Flash), translated to slots of the pages."""

from __future__ import annotations

from typing import Any

import torch

from flashlatte.engine.pooled_indexer import LayersOfLength
from flashlatte.integrations.transformers.calls import CACHE
from flashlatte.integrations.transformers.padded import PagedLatents


class PoolStates:
    """Cache argument of the stock indexer, whose states per column stay in the layout of transformers.

    Args:
        latents: pages of the step.
    """

    def __init__(self, latents: PagedLatents) -> None:
        self._latents = latents

    @property
    def layers(self) -> LayersOfLength:
        """Layers of all columns, new ones included."""
        return LayersOfLength(self._latents.columns + self._latents.step.queries)

    def update_indexer(self, states: torch.Tensor, layer: int) -> torch.Tensor:
        """Append the states of new columns [b, queries, width]; returns those of all columns."""
        return self._latents.append_column_states(layer, states)


def select_columns(
    module: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    latents: PagedLatents,
    shared: torch.Tensor | None,
) -> torch.Tensor:
    """Columns that each token attends to, int32 [b, s, n], then -1: the module's selection, or the ``shared`` one.

    Args:
        attention_mask: bool [b, s], the new tokens that are not hidden.
    """
    if module.indexer is None:
        if shared is None:
            raise ValueError(f"layer {module.layer_idx} needs the selection of the layer before it, got None")
        return shared
    latent = module.q_a_layernorm(module.q_a_proj(hidden_states))
    return module.indexer(
        hidden_states=hidden_states, q_resid=latent, attention_mask=attention_mask, **{CACHE: PoolStates(latents)}
    )
