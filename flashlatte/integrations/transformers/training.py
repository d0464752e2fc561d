"""Training steps of enabled transformers models. Importing this module imports transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flashlatte.integrations.transformers import packed
from flashlatte.integrations.transformers.calls import CACHE, tokens_of
from flashlatte.integrations.transformers.families import Family, cosines_and_sines
from flashlatte.integrations.transformers.indexer_losses import IndexerLosses
from flashlatte.layers import training
from flashlatte.layers.config import IndexerConfig
from flashlatte.layers.parts import owns_latents, part, source_layer
from flashlatte.layers.training import KeyRows, TrainingOutput, product_dtype
from flashlatte.layers.training_batch import Rotation, TrainingBatch

# The argument by which a decoder passes the step to its layers.
STEP = "flashlatte_step"


class SharedRows:
    """The rows of layers whose latents later layers read, by layer. FSDP2 would copy a dict for each layer."""

    def __init__(self) -> None:
        self.by_layer: dict[int, KeyRows] = {}


@dataclass(frozen=True)
class TrainingStep:
    """A training step.

    Attributes:
        batch: its sequences.
        indexer: the model's indexer; None for a model without one.
        losses: losses of the layers' indexers.
        positions: int [T], positions of the tokens in their sequences; None: the ``position_ids`` passed to a layer.
        rows: rows that layers share.
        dense: whether layers with an indexer attend to all tokens, as in its warm-up.
    """

    batch: TrainingBatch
    indexer: IndexerConfig | None
    losses: IndexerLosses
    positions: torch.Tensor | None
    rows: SharedRows
    dense: bool


def plan(
    model: Any, family: Family, call: dict[str, Any], find_indexer: Callable[[], IndexerConfig | None], dense: bool
) -> TrainingStep | None:
    """The training step of a decoder's call; None if stock attention computes it.

    Args:
        find_indexer: returns the model's indexer; called only if needed, since it takes time.
        dense: as in ``TrainingStep``.

    Raises:
        ValueError: an indexer requires gradients, and only stock attention, which does not train it, supports the call.
    """
    tokens = tokens_of(call)
    if not is_training(model) or tokens is None:
        return None
    indexer, mask = find_indexer(), call.get("attention_mask")
    reason = (
        family.training_refusal
        or packed.refusal(call, tokens)
        or refusal(model, tokens, packed.rest(call), family.default_implementation)
    )
    if reason is None and mask is not None and not _is_padding(mask.bool()):
        reason = "its attention_mask does more than hide padding on the left or on the right"
    if is_refused(model, reason):
        return None
    requests, length = tokens.shape[:2]
    if mask is None:
        batch = packed.batch(call, tokens) or rectangle(requests, length, tokens.device)
    else:
        batch = _padded(mask.bool())
    losses, positions = IndexerLosses(tokens.device), packed.positions(call, batch)
    return TrainingStep(batch, indexer, losses, positions, SharedRows(), dense)


def is_training(model: Any) -> bool:
    return model.training and torch.is_grad_enabled()


def is_refused(model: Any, reason: str | None) -> bool:
    """Whether stock attention computes a call, for ``reason``.

    Raises:
        ValueError: an indexer requires gradients.
    """
    if reason is not None and _trains_indexer(model):
        raise ValueError(
            f"an enabled model whose indexer is trained cannot compute this training step: {reason}. Freeze the "
            "indexer (requires_grad_(False)) or disable(model), and transformers' attention computes it without "
            "training the indexer"
        )
    return reason is not None


def prefers_stock(module: Any, step: TrainingStep) -> bool:
    """Whether stock attention computes a layer, as for float32 on a GPU, where only slower references are available.

    Never for a model with an indexer, which stock attention does not train. The dtype is checked for each layer, since
    FSDP may change it.
    """
    if step.indexer is not None:
        return False
    weight = module.kv_a_proj_with_mqa.weight
    return weight.device.type != "cpu" and product_dtype(weight) == torch.float32


def attend(
    module: Any, family: Family, hidden_states: torch.Tensor, step: TrainingStep, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of [b, s, hidden_size], and the selection for the next layer."""
    requests, length = hidden_states.shape[:2]
    rotation = None
    if family.rotates(module):
        cosines, sines = (
            x.expand(requests, -1, -1).flatten(0, 1) for x in cosines_and_sines(kwargs["position_embeddings"])
        )
        rotation = Rotation(cosines, sines, family.interleaved(module.config))
    factors, positions, scaling = None, None, family.query_scaling(module.config)
    if scaling is not None or part(module, "softmax_scaling") is not None:
        positions = _positions(hidden_states, step, kwargs)
        factors = None if scaling is None else scaling.factors(positions)
    window, flat = part(module, "sliding_window"), hidden_states.flatten(0, 1)
    output = training.attend(
        module,
        flat,
        step.batch,
        rotation,
        indexer=getattr(module, "indexer", None),
        config=step.indexer if window is None else None,
        indices=kwargs.get("prev_topk_indices"),
        dense=step.dense,
        query_factors=factors,
        window=window,
        rows=_shared_rows(module, flat, step, rotation),
        positions=positions,
    )
    return with_loss(output, step.losses).view(requests, length, -1), output.indices


def _positions(hidden_states: torch.Tensor, step: TrainingStep, kwargs: dict[str, Any]) -> torch.Tensor:
    """[b · s], positions of the tokens."""
    if step.positions is not None:
        return step.positions
    requests, length = hidden_states.shape[:2]
    positions = kwargs.get("position_ids")
    if positions is None:
        positions = torch.arange(length, device=hidden_states.device)[None]
    return positions.expand(requests, -1).flatten()


def _shared_rows(module: Any, hidden: torch.Tensor, step: TrainingStep, rotation: Rotation | None) -> KeyRows | None:
    """The rows of a layer that reads an earlier layer's rows, or whose rows later layers read; None for other layers.

    Raises:
        ValueError: a reentrant checkpoint, whose first pass records no graph through which a gradient could reach the
            earlier layer.
    """
    reads = not owns_latents(module)
    if not (reads or getattr(module, "store_full_length_kv", False)):
        return None
    if not torch.is_grad_enabled():
        raise ValueError(
            "a reentrant checkpoint loses the gradients of latents that layers share: pass use_reentrant=False"
        )
    source = source_layer(module)
    if not reads:
        step.rows.by_layer[source] = training.key_rows(module, hidden, rotation)
    return step.rows.by_layer[source]


def with_loss(output: TrainingOutput, losses: IndexerLosses) -> torch.Tensor:
    """A layer's output [T, hidden_size], with the loss of its indexer attached."""
    if output.indexer_loss is None or output.num_rows is None:
        return output.out
    return losses.attach(output.out, output.indexer_loss, output.num_rows)


def refusal(model: Any, tokens: torch.Tensor, call: dict[str, Any], implementation: str) -> str | None:
    """Why ``layers.training`` cannot compute a call; None if it can.

    Args:
        implementation: transformers' default attention implementation for the model.
    """
    config, mask, cache = model.config, call.get("attention_mask"), call.get(CACHE)
    if call.get("output_attentions", config.output_attentions):
        return "it returns attention weights (output_attentions)"
    if config._attn_implementation != implementation:
        return f"its attention implementation is {config._attn_implementation!r}, not {implementation!r}"
    if config.attention_dropout:
        return f"it has an attention_dropout of {config.attention_dropout}"
    if cache is not None:
        return "it has a cache"
    positions = call.get("position_ids")
    # position_ids with three axes are those of images, not of packed sequences.
    of_images = positions is not None and positions.dim() == 3 and positions.shape[0] == 3
    if not (positions is None or of_images) or any(name.startswith("cu_seq_lens") for name in call):
        return "it has position_ids, or packed sequences"
    if call.get("is_causal", getattr(config, "is_causal", True)) is False:
        return "it is not causal"
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.shape == tokens.shape[:2]):
        return "its attention_mask is not a tensor of one value for each token"
    return None


def _trains_indexer(model: Any) -> bool:
    return any(weight.requires_grad for name, weight in model.named_parameters() if ".indexer." in name)


def _is_padding(mask: torch.Tensor) -> bool:
    """Whether the visible tokens of each row of a mask [b, s] are contiguous. Synchronizes with the device."""
    begins = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    return bool((begins.sum(dim=1) <= 1).all())


def rectangle(requests: int, length: int, device: torch.device) -> TrainingBatch:
    boundaries = torch.arange(0, requests * length + 1, length, dtype=torch.int32, device=device)
    return TrainingBatch.packed(boundaries, length, requests * length)


def _padded(mask: torch.Tensor) -> TrainingBatch:
    """The batch of a mask [b, s]: in each row padding, a sequence and padding, each of which may be empty."""
    requests, length = mask.shape
    row = torch.arange(requests, device=mask.device) * length
    first = mask.int().argmax(dim=1)
    columns = row, row + first, row + first + mask.sum(dim=1)
    last = torch.full((1,), requests * length, device=mask.device)
    batch = TrainingBatch.packed(torch.cat((torch.stack(columns, dim=1).flatten(), last)), length, mask.numel())
    # Padding selects nothing.
    key_start, key_end = (torch.where(mask.flatten(), x, 0) for x in (batch.key_start, batch.key_end))
    return TrainingBatch(batch.cu_seqlens, length, key_start, key_end, has_padding=True)
