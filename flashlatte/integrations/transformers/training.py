"""Training steps of enabled transformers models. Importing this module imports transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.utils.generic import ModelOutput

from flashlatte.integrations.transformers import packed
from flashlatte.integrations.transformers.calls import CACHE, tokens_of
from flashlatte.integrations.transformers.families import Family, cosines_and_sines
from flashlatte.layers import training
from flashlatte.layers.config import IndexerConfig
from flashlatte.layers.training import Rotation, TrainingBatch

# Families whose attention has the parts of ``layers.training``, and no others.
TRAINED = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
# The argument by which a decoder passes the step to its layers.
STEP = "flashlatte_step"
# Output of an enabled model with an indexer.
LOSS = "indexer_loss"


@dataclass
class TrainingStep:
    """A training step: its batch, and the indexers' losses of its layers.

    Attributes:
        indexer: the model's indexer; None for a model without one.
        losses: mean divergence of a layer's tokens, by layer; None once they are summed. The backward pass of a
            checkpointed layer computes its loss again.
    """

    batch: TrainingBatch
    indexer: IndexerConfig | None
    losses: dict[int, torch.Tensor] | None = field(default_factory=dict)

    def add(self, layer: int, loss: torch.Tensor, num_rows: torch.Tensor) -> None:
        # Also where it is not kept: a checkpoint must save the same tensors again.
        mean = loss / num_rows.clamp_min(1)
        if self.losses is not None:
            self.losses[layer] = mean

    def total(self) -> torch.Tensor | None:
        """The sum over layers; None without an indexer that learns.

        Raises:
            ValueError: it has no gradient, as under a reentrant checkpoint.
        """
        losses, self.losses = list((self.losses or {}).values()), None
        if not losses:
            return None
        if not all(loss.requires_grad for loss in losses):
            raise ValueError(
                "gradient checkpointing must not be reentrant (use_reentrant=False) in a model whose indexer learns"
            )
        return torch.stack([loss.to(losses[0].device) for loss in losses]).sum()


class LossHooks:
    """Hooks that put the indexers' losses into the output of a decoder, and of the model around it.

    Args:
        coefficient: factor of the loss in the model's own loss.
    """

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient
        self._pending: torch.Tensor | None = None

    def end_decoder(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        step = kwargs.get(STEP)
        self._pending = None if step is None else step.total()
        if self._pending is not None:
            _check_output(output)
            output[LOSS] = self._pending

    def end_model(self, model: Any, args: tuple[Any, ...], output: Any) -> None:
        loss, self._pending = self._pending, None
        if loss is None:
            return
        _check_output(output)
        output[LOSS] = loss
        if output.get("loss") is not None:
            output["loss"] = output["loss"] + self.coefficient * loss.to(output["loss"].device)

    def __deepcopy__(self, memo: dict[int, Any]) -> LossHooks:
        # A pending loss has a graph, which cannot be copied.
        copied = memo[id(self)] = LossHooks(self.coefficient)
        return copied


def plan(
    model: Any, family: Family, call: dict[str, Any], find_indexer: Callable[[], IndexerConfig | None]
) -> TrainingStep | None:
    """The training step of a decoder's call; None if stock attention computes it.

    Args:
        find_indexer: returns the model's indexer. It takes time.

    Raises:
        ValueError: an indexer would learn, and only stock attention, which does not train it, can compute the call.
    """
    tokens = tokens_of(call)
    if not (model.training and torch.is_grad_enabled()) or family.model_type not in TRAINED or tokens is None:
        return None
    indexer = find_indexer()
    reason = packed.refusal(call, tokens) or _refusal(model, indexer, tokens, packed.rest(call))
    if reason is None:
        requests, length = tokens.shape[:2]
        mask = call.get("attention_mask")
        if mask is None:
            batch = packed.batch(call, tokens) or _rectangle(requests, length, tokens.device)
        else:
            batch = _padded(mask.bool())
        return TrainingStep(batch, indexer)
    if indexer is not None and _learns(model):
        raise ValueError(
            f"an enabled model whose indexer learns cannot compute this training step: {reason}. Freeze the indexer "
            "(requires_grad_(False)) or disable(model), and transformers' attention computes it without training the "
            "indexer"
        )
    return None


def attend(
    module: Any, family: Family, hidden_states: torch.Tensor, step: TrainingStep, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of [b, s, hidden_size], and the selection for the next layer."""
    requests, length = hidden_states.shape[:2]
    cosines, sines = (
        x.expand(requests, -1, -1).flatten(0, 1) for x in cosines_and_sines(kwargs["position_embeddings"])
    )
    rotation = Rotation(cosines, sines, family.interleaved(module.config))
    output = training.attend(
        module,
        hidden_states.flatten(0, 1),
        step.batch,
        rotation,
        indexer=getattr(module, "indexer", None),
        config=step.indexer,
        indices=kwargs.get("prev_topk_indices"),
    )
    if output.indexer_loss is not None and output.num_rows is not None:
        step.add(module.layer_idx, output.indexer_loss, output.num_rows)
    return output.out.view(requests, length, -1), output.indices


def _refusal(model: Any, indexer: IndexerConfig | None, tokens: torch.Tensor, call: dict[str, Any]) -> str | None:
    """Why ``layers.training`` cannot compute a call; None if it can."""
    config, mask, cache = model.config, call.get("attention_mask"), call.get(CACHE)
    if call.get("output_attentions", config.output_attentions):
        return "it returns attention weights (output_attentions)"
    if config._attn_implementation != "sdpa":
        return f"its attention implementation is {config._attn_implementation!r}, not 'sdpa'"
    if config.attention_dropout:
        return f"it has an attention_dropout of {config.attention_dropout}"
    if cache is not None:
        return "it has a cache"
    if call.get("position_ids") is not None or any(name.startswith("cu_seq_lens") for name in call):
        return "it has position_ids, or packed sequences"
    if call.get("is_causal", getattr(config, "is_causal", True)) is False:
        return "it is not causal"
    if mask is not None and not (
        isinstance(mask, torch.Tensor) and mask.shape == tokens.shape[:2] and _is_padding(mask.bool())
    ):
        return "its attention_mask does more than hide padding on the left or on the right"
    device_type = model.device.type
    autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if autocast else model.dtype
    # float32 runs on references, which are slower than stock attention; stock attention does not train an indexer.
    if dtype == torch.float32 and device_type != "cpu" and indexer is None:
        return "it computes in float32"
    return None


def _learns(model: Any) -> bool:
    return any(weight.requires_grad for name, weight in model.named_parameters() if ".indexer." in name)


def _is_padding(mask: torch.Tensor) -> bool:
    """Whether each row of a mask [b, s] shows one run of tokens, or none. Synchronises with the device."""
    begins = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    return bool((begins.sum(dim=1) <= 1).all())


def _rectangle(requests: int, length: int, device: torch.device) -> TrainingBatch:
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
    return TrainingBatch(batch.cu_seqlens, length, key_start, key_end)


def _check_output(output: Any) -> None:
    if not isinstance(output, ModelOutput):
        raise ValueError(
            f"return_dict must be True for a model whose indexer learns: a {type(output).__name__} has no {LOSS}"
        )
