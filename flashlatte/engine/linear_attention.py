"""Layers of linear attention: transformers' modules, over states that are kept for each request.

A module computes batches of requests with equally many new tokens, because padding would change the states. The
requests of a step are therefore grouped by their number of tokens: all requests that generate are one group, and each
chunk of a prompt is usually a group of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from flashlatte.engine.batch import StepBatch
from flashlatte.engine.pooled_indexer import PooledStep
from flashlatte.layers.metadata import MLAMetadata
from flashlatte.runtime.transfer import to_device


@dataclass(frozen=True)
class TokenGroup:
    """Equally many consecutive tokens of n requests.

    Attributes:
        rows: int64 [n, tokens], rows of the flat batch.
        slots: int64 [n], slots of the requests' states, which are read and written.
        snapshots: int64 [m], requests of the group whose states are copied after these tokens.
        snapshot_slots: int64 [m], target slots of the copies.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    snapshots: torch.Tensor
    snapshot_slots: torch.Tensor


@dataclass(frozen=True)
class HybridMetadata:
    """Metadata of a step of a model with layers of linear attention, or with an indexer of pools.

    Attributes:
        attention: for the MLA layers.
        groups: for layers of linear attention, in the order in which they are computed.
        pools: for indexers of pools; None: the model has none.
    """

    attention: MLAMetadata
    groups: Sequence[TokenGroup] = ()
    pools: PooledStep | None = None

    @property
    def num_tokens(self) -> int:
        return self.attention.num_tokens

    @property
    def buffers(self) -> object:
        return self.attention.buffers


def token_groups(batch: StepBatch, device: torch.device) -> list[TokenGroup]:
    """The groups of a step. A request is divided at a snapshot, so that the states at this position are computed."""
    groups: dict[tuple[int, int], list[tuple[int, int, int | None]]] = defaultdict(list)
    row = 0
    for count, slot, snapshots in zip(batch.counts, batch.state_slots, batch.snapshots, strict=True):
        begin = 0
        for part, (end, snapshot) in enumerate([*snapshots, (count, None)]):
            if end > begin:
                groups[part, end - begin].append((row + begin, slot, snapshot))
            begin = end
        row += count
    # In order, so that the parts of a request are computed one after the other.
    return [_group(groups[part, tokens], tokens, device) for part, tokens in sorted(groups)]


def _group(members: Sequence[tuple[int, int, int | None]], tokens: int, device: torch.device) -> TokenGroup:
    rows = [list(range(begin, begin + tokens)) for begin, _, _ in members]
    taken = [(index, slot) for index, (_, _, slot) in enumerate(members) if slot is not None]
    snapshots, snapshot_slots = [index for index, _ in taken], [slot for _, slot in taken]
    lists: tuple[list[Any], ...] = rows, [slot for _, slot, _ in members], snapshots, snapshot_slots
    return TokenGroup(*(to_device(values, device) for values in lists))


class LayerStates:
    """The states of some requests in one layer, with the interface of transformers' ``Cache`` for linear attention.

    Args:
        conv: [n, channels, kernel_size], the last inputs of the convolution; None: zeros.
        recurrent: [n, …]; None: zeros.
    """

    def __init__(self, conv: torch.Tensor | None = None, recurrent: torch.Tensor | None = None) -> None:
        self.conv, self.recurrent = conv, recurrent

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both states, after a call of the module."""
        assert self.conv is not None
        assert self.recurrent is not None
        return self.conv, self.recurrent

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        return self.conv is not None

    @property
    def layers(self) -> Mapping[int, SimpleNamespace]:
        """The states at any layer's index, as modules of transformers before 5.21 read them."""
        states = SimpleNamespace(conv_states=[self.conv], recurrent_states=[self.recurrent])
        return defaultdict(lambda: states)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The convolution's last inputs. For a single token, the module updates them in place."""
        return self.conv

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int
    ) -> torch.Tensor:
        """Append new inputs [n, channels, tokens]; returns [n, channels, kernel_size + tokens]."""
        before = conv_states.new_zeros(*conv_states.shape[:-1], conv_kernel_size) if self.conv is None else self.conv
        inputs = torch.cat((before, conv_states), dim=-1)
        self.conv = inputs[..., -conv_kernel_size:]
        return inputs

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.recurrent

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0
    ) -> torch.Tensor:
        self.recurrent = recurrent_states
        return recurrent_states


class LinearAttention:
    """A layer of linear attention on flat batches.

    Args:
        module: transformers' module, called as module(hidden [n, tokens, hidden_size], cache).
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self._device = next(module.parameters()).device

    def allocate_states(self, num_slots: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        """States [num_slots, …] of the convolution and of the recurrence: zeros.

        Their shapes and dtypes are those that the module leaves, for hidden states in ``dtype``.
        """
        states = LayerStates()
        with torch.no_grad():
            self.module(torch.zeros(1, 2, self.module.hidden_size, dtype=dtype, device=self._device), states)
        return [
            torch.zeros(num_slots, *state.shape[1:], dtype=state.dtype, device=device) for state in states.tensors()
        ]

    def __call__(
        self, hidden: torch.Tensor, conv: torch.Tensor, recurrent: torch.Tensor, groups: Sequence[TokenGroup]
    ) -> torch.Tensor:
        """Hidden states [T, hidden_size] after the layer; updates the states of ``allocate_states``."""
        out = torch.empty_like(hidden)
        for group in groups:
            states = LayerStates(conv[group.slots], recurrent[group.slots])
            out[group.rows] = self.module(hidden[group.rows], states)
            for pool, state in zip((conv, recurrent), states.tensors(), strict=True):
                pool[group.slots] = state
                if len(group.snapshots):
                    pool[group.snapshot_slots] = state[group.snapshots]
        return out
