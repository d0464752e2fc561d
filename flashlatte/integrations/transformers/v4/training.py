"""Training steps of an enabled DeepSeek-V4. Importing this module imports transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashlatte.integrations.transformers import packed
from flashlatte.integrations.transformers.calls import tokens_of
from flashlatte.integrations.transformers.indexer_losses import IndexerLosses
from flashlatte.integrations.transformers.training import is_refused, is_training, rectangle, refusal, with_loss
from flashlatte.layers.v4 import V4Config, training
from flashlatte.layers.v4.training import TrainingGroups


@dataclass(frozen=True)
class V4TrainingStep:
    """A training step of b rows of the same number of tokens.

    Without a mask, rows may hold packed sequences. With one, a row is a sequence, padding included: as in transformers,
    groups contain padding, which is hidden from windows only.

    Attributes:
        max_seqlen: tokens of the longest sequence.
        window: int32 [b · s, window], the tokens in each token's window.
        groups: compressed groups, by number of tokens in a group.
        shown: bool [b · s], False for padding, which is not part of the indexers' loss; None without padding.
        configs: config of each layer.
        losses: losses of the layers' indexers.
        dense: whether layers with an indexer attend to all groups, as in its warm-up.
    """

    max_seqlen: int
    window: torch.Tensor
    groups: dict[int, TrainingGroups]
    shown: torch.Tensor | None
    configs: tuple[V4Config, ...]
    losses: IndexerLosses
    dense: bool


def plan(model: Any, call: dict[str, Any], dense: bool) -> V4TrainingStep | None:
    """The training step of a decoder's call; None if stock attention computes it. ``dense`` as in ``V4TrainingStep``.

    Raises:
        ValueError: an indexer requires gradients, and only stock attention, which does not train it, supports the call.
    """
    tokens = tokens_of(call)
    if not is_training(model) or tokens is None:
        return None
    configs, mask = V4Config.layers(model.config), call.get("attention_mask")
    reason = packed.refusal(call, tokens) or refusal(model, tokens, packed.rest(call), "eager")
    if reason is None and mask is not None and call.get("position_ids") is not None:
        reason = "it has position_ids and an attention_mask"
    batch = None
    if reason is None:
        requests, length = tokens.shape[:2]
        batch = packed.batch(call, tokens) or rectangle(requests, length, tokens.device)
        # transformers computes a token's visible groups from its position, regardless of sequence boundaries.
        if not packed.counts_from_zero(call, batch, requests):
            reason = "its position_ids do not count from 0 in each sequence"
    if is_refused(model, reason) or batch is None:
        return None
    shown = None if mask is None else mask.bool().flatten()
    window = training.window_tokens(batch, configs[0].window, shown)
    groups = {ratio: TrainingGroups.of(batch, ratio) for ratio in {config.ratio for config in configs} if ratio}
    return V4TrainingStep(batch.max_seqlen, window, groups, shown, configs, IndexerLosses(tokens.device), dense)


def attend(
    module: Any, hidden_states: torch.Tensor, step: V4TrainingStep, position_embeddings: dict[str, Any]
) -> torch.Tensor:
    """Attention of [b, s, hidden_size]."""
    config, (requests, length) = step.configs[module.layer_idx], hidden_states.shape[:2]
    cosines, sines = (x.expand(requests, -1, -1).flatten(0, 1) for x in position_embeddings[module.rope_layer_type])
    output = training.attend(
        module,
        config,
        hidden_states.flatten(0, 1),
        step.window,
        step.groups.get(config.ratio),
        cosines,
        sines,
        max_seqlen=step.max_seqlen,
        counted=step.shown,
        dense=step.dense,
    )
    return with_loss(output, step.losses).view(requests, length, -1)
