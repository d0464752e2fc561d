"""``V41Attention``: DeepSeek-V4.1's attention layer."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn

from flashlatte.layers.v4.attention import V4Attention
from flashlatte.layers.v4.cache import V4Cache
from flashlatte.layers.v4.config import V4Config
from flashlatte.layers.v4.step import V4Step
from flashlatte.layers.v41.checkpoint import load_weights
from flashlatte.layers.v41.config import V41Config
from flashlatte.layers.v41.group_step import V41GroupStep
from flashlatte.layers.v41.modules import V41Compressor
from flashlatte.layers.v41.selection import SharedSelections
from flashlatte.runtime import checks


class V41Attention(V4Attention):
    """DeepSeek-V4.1's attention layer. A step may mix prefill and decode tokens of several requests.

    The parameters have the names of ``V4Attention``; ``load_weights`` takes a checkpoint's. The layer is for inference,
    as ``V4Attention``.

    Args:
        config: configuration of the layer.
        backend, dtype, device: as for ``V4Attention``.

    Raises:
        TypeError, ValueError: as ``V4Attention``.
    """

    config_type: ClassVar[type[V4Config]] = V41Config
    config: V41Config

    def _make_compressor(self, dtype: torch.dtype | None, device: torch.device | str | None) -> nn.Module:
        return V41Compressor(self.config, dtype, device)

    def forward(
        self, hidden: torch.Tensor, step: V4Step, cache: V4Cache, selections: SharedSelections | None = None
    ) -> torch.Tensor:
        """Store the step's tokens in ``cache`` and return the attention output [T, hidden_size].

        Args:
            hidden: hidden states [T, hidden_size].
            step: the step's metadata, with groups of the layer's ratio.
            cache: the caches of this layer; groups of a layer that shares them are those of its ``kv_source``
                (``allocate_caches``), which has run in this step.
            selections: the selections of the step's indexers so far; this layer's indexer adds to it. None if the layer
                reads no groups or selections of another layer.

        Raises:
            TypeError, ValueError: arguments that do not fit the layer or each other; a source that has not run.
        """
        checks.instance("selections", selections, SharedSelections, or_none=True)
        selections = SharedSelections() if selections is None else selections
        _check_selections(self.config, selections, step.num_tokens)
        if not torch.compiler.is_compiling():
            _check_shared_caches(self.config, selections, cache)
        return self._attend(hidden, step, cache, functools.partial(V41GroupStep, selections=selections))

    def forward_training(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise TypeError: groups and selections that layers share have no gradient here."""
        raise TypeError("V41Attention is for inference: groups and selections that layers share have no gradient")

    def load_weights(self, weights: Mapping[str, torch.Tensor], block_size: tuple[int, int] = (32, 32)) -> None:
        """Load the layer's weights from a checkpoint, by DeepSeek's names as vLLM 0.33 reads them.

        Args:
            weights: the tensors below ``layers.N.attn.``, such as ``wq_a.weight`` (``layers.checkpoint.read_layer``
                with ``module="attn"``). One-byte weights have a ``scale`` for each block.
            block_size: rows and columns of a block, the checkpoint's ``weight_block_size``.

        Raises:
            ValueError: missing, unknown or misshapen weights.
        """
        load_weights(self, weights, block_size)


def _check_shared_caches(config: V41Config, selections: SharedSelections, cache: V4Cache) -> None:
    """Check that the groups and index keys that the layer reads are those that its source has stored in this step."""
    if config.kv_source is None or config.stores_groups:
        return
    source = selections.caches.get(config.kv_source)
    for name in ("groups", "index_keys") if config.selects_groups else ("groups",):
        own, stored = getattr(cache, name), getattr(source, name, None)
        if own is not None and (stored is None or own.data_ptr() != stored.data_ptr()):
            raise ValueError(
                f"cache.{name} must be the tensor that layer {config.kv_source} has stored to in this step, got "
                f"{'none stored there' if stored is None else 'another tensor'}"
            )


def _check_selections(config: V41Config, selections: SharedSelections, tokens: int) -> None:
    """Check that the layers whose selections are read have run in this step."""
    if config.index_source is not None and not config.selects_groups:
        selected = selections.groups.get(config.index_source)
        if selected is None or selected.counts.shape[0] != tokens:
            raise ValueError(
                f"selections must hold the groups of layer {config.index_source} for the step's {tokens} tokens, got "
                f"{'nothing' if selected is None else f'{selected.counts.shape[0]} tokens'}"
            )
    if config.candidates is not None and not config.publishes_candidates:
        blocks = selections.blocks.get(config.candidates.source)
        if blocks is None or blocks.shape[0] != tokens:
            raise ValueError(
                f"selections must hold the candidate blocks of layer {config.candidates.source} for the step's "
                f"{tokens} tokens, got {'nothing' if blocks is None else f'{blocks.shape[0]} tokens'}"
            )
