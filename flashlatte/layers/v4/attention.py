"""``V4Attention``: DeepSeek-V4's attention layer, and its computation for any module with such projections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from flashlatte.layers import rope
from flashlatte.layers.fused_projections import bmm_into, fuse_weights, linear
from flashlatte.layers.training import TrainingOutput
from flashlatte.layers.training_batch import TrainingBatch, check_sequences
from flashlatte.layers.v4 import training
from flashlatte.layers.v4.cache import V4Cache
from flashlatte.layers.v4.cache_attention import attend_cache
from flashlatte.layers.v4.config import V4Config
from flashlatte.layers.v4.group_step import GroupStep
from flashlatte.layers.v4.modules import LayerCompressor, NormWeight, hidden_projections, output_matrix, project_hidden
from flashlatte.layers.v4.step import V4Step
from flashlatte.layers.weights import norm_weight
from flashlatte.ops.norm_rope import Rotary, rotate_heads
from flashlatte.ops.q_kv_norm import q_kv_norm
from flashlatte.ops.rotate_and_cache import rotate_and_cache
from flashlatte.runtime import checks, dispatch, gradients, machine


class V4Projections(Protocol):
    """A layer's module: this package's ``V4Attention``, or transformers' ``DeepseekV4Attention``."""

    q_a_proj: Any
    q_a_norm: Any
    q_b_proj: Any
    kv_proj: Any
    kv_norm: Any
    o_a_proj: Any
    o_b_proj: Any
    sinks: Any
    compressor: Any


class V4Attention(nn.Module):
    """DeepSeek-V4's attention layer. A step may mix prefill and decode tokens of several requests.

    The parameters have transformers' names (``DeepseekV4Attention``), and its state dict fits. ``forward`` is for
    inference: no gradient flows through it, and its first call that would record gradients of its input or of a
    parameter warns. ``forward_training`` has gradients.

    Args:
        config: configuration of the layer.
        backend: backend of the operations, "portable" or "reference"; None selects one for each.
        dtype, device: dtype and device of the parameters, which are not initialized. Norms, sinks and the compressor's
            position bias are float32 in any case.

    Raises:
        TypeError, ValueError: a config that is not a ``V4Config``; an unknown backend or device.
    """

    config_type: ClassVar[type[V4Config]] = V4Config

    def __init__(
        self,
        config: V4Config,
        *,
        backend: str | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if type(config) is not self.config_type:
            checks.instance("config", config, self.config_type)
            raise TypeError(f"config must be of type {self.config_type.__name__}, got {type(config).__name__}")
        if backend is not None:
            checks.choice("backend", backend, dispatch.backends())
        device = checks.device("device", device)
        self.config, self.backend = config, backend
        self._rope_table_id = rope.table_id(config.rope, config.rope_dim)
        width = config.num_attention_heads * config.head_dim
        groups, rank = config.o_groups, config.o_lora_rank
        self.q_a_proj = linear(config.hidden_size, config.q_lora_rank, dtype, device)
        self.q_a_norm = NormWeight(config.q_lora_rank, device)
        self.q_b_proj = linear(config.q_lora_rank, width, dtype, device)
        self.kv_proj = linear(config.hidden_size, config.head_dim, dtype, device)
        self.kv_norm = NormWeight(config.head_dim, device)
        self.o_a_proj = linear(width // groups, groups * rank, dtype, device)
        self.o_b_proj = linear(groups * rank, config.hidden_size, dtype, device)
        self.sinks = nn.Parameter(torch.empty(config.num_attention_heads, dtype=torch.float32, device=device))
        self.compressor = None if config.ratio == 0 else self._make_compressor(dtype, device)
        self.requires_grad_(False)
        fuse_weights(*hidden_projections(self, config))

    def _make_compressor(self, dtype: torch.dtype | None, device: torch.device | str | None) -> nn.Module:
        return LayerCompressor(self.config, dtype, device)

    def _apply(self, fn: Any, recurse: bool = True) -> V4Attention:
        # Moving or casting gives each parameter its own storage.
        super()._apply(fn, recurse)
        fuse_weights(*hidden_projections(self, self.config))
        return self

    def forward(self, hidden: torch.Tensor, step: V4Step, cache: V4Cache) -> torch.Tensor:
        """Store the step's tokens in ``cache`` and return the attention output [T, hidden_size].

        Args:
            hidden: hidden states [T, hidden_size].
            step: the step's metadata.
            cache: the caches of this layer.

        Raises:
            TypeError, ValueError: arguments that do not fit the layer or each other.
        """
        return self._attend(hidden, step, cache, GroupStep)

    def _attend(
        self, hidden: torch.Tensor, step: V4Step, cache: V4Cache, make_group_step: Callable[..., GroupStep]
    ) -> torch.Tensor:
        weight = self.q_a_proj.weight
        if isinstance(hidden, torch.Tensor):
            if hidden.dtype != weight.dtype and weight.dtype in checks.FLOAT_DTYPES:
                expected, got = checks.dtype_names([weight.dtype]), checks.dtype_names([hidden.dtype])
                raise TypeError(f"hidden must be {expected} like the layer, got {got}")
            gradients.warn_if_layer_drops(type(self).__name__, self, hidden)
        with torch.no_grad():
            table_id = self._rope_table_id
            return attend(self, self.config, hidden, step, cache, self.backend, table_id, make_group_step)

    def forward_training(
        self, hidden: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, *, dense: bool = False
    ) -> TrainingOutput:
        """Causal attention of packed sequences without a cache, with gradients of the input and of the parameters.

        Window and groups are attended to in one call of ``sparse_attention``. The indexer is trained by its loss alone,
        which has gradients of the indexer's parameters only. A token's position is its index in its sequence. Backends
        are selected automatically.

        Args:
            hidden: [tokens, hidden_size] in the parameters' dtype, or any dtype under autocast.
            cu_seqlens: int32 or int64 [n + 1], boundaries of the sequences, from 0.
            max_seqlen: tokens of the longest sequence.
            dense: attend to every group although the layer has an indexer, which then trains on all groups (the
                warm-up).

        Returns:
            The layer's output [tokens, hidden_size], the loss of its indexer, and the selected groups, as indices of
            the batch's groups, which are ordered by sequence.

        Raises:
            TypeError, ValueError: an argument of the wrong type, dtype, shape or device.
        """
        config, weight = self.config, self.kv_proj.weight
        dtypes = checks.FLOAT_DTYPES if torch.is_autocast_enabled(weight.device.type) else (weight.dtype,)
        checks.tensor("hidden", hidden, ("tokens", config.hidden_size), dtypes, weight.device)
        checks.tensor("cu_seqlens", cu_seqlens, ("n + 1",), checks.INDEX_DTYPES, weight.device)
        check_sequences(cu_seqlens, max_seqlen, hidden.shape[0], config.rope.max_position)
        batch = TrainingBatch.packed(cu_seqlens, max_seqlen, hidden.shape[0])
        positions = (batch.key_end - 1 - batch.key_start).clamp_(0, config.rope.max_position - 1)
        cosines, sines = rope.rotary_table(self._rope_table_id, weight.device)[positions].chunk(2, dim=-1)
        return training.attend(
            self,
            config,
            hidden,
            training.window_tokens(batch, config.window),
            training.TrainingGroups.of(batch, config.ratio) if config.ratio else None,
            cosines,
            sines,
            max_seqlen=max_seqlen,
            dense=checks.flag("dense", dense),
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Table ids are local to a process.
        self._rope_table_id = rope.table_id(self.config.rope, self.config.rope_dim)
        # In a copy, each parameter has its own storage.
        fuse_weights(*hidden_projections(self, self.config))


def attend(
    module: V4Projections,
    config: V4Config,
    hidden: torch.Tensor,
    step: V4Step,
    cache: V4Cache,
    backend: str | None = None,
    rope_table_id: int | None = None,
    make_group_step: Callable[..., GroupStep] = GroupStep,
) -> torch.Tensor:
    """``V4Attention.forward`` with the projections of ``module``.

    Args:
        rope_table_id: looked up if None.
        make_group_step: makes the object that stores and selects groups, from the arguments of ``GroupStep``.
    """
    checks.tensor("hidden", hidden, (step.positions.shape[0], config.hidden_size), checks.FLOAT_DTYPES)
    _check_step(config, step, cache)
    heads, head_dim = config.num_attention_heads, config.head_dim
    if rope_table_id is None:
        rope_table_id = rope.table_id(config.rope, config.rope_dim)
    table = rope.rotary_table(rope_table_id, hidden.device)
    o_a = output_matrix(module, hidden.dtype)
    projected = project_hidden(module, config, hidden)
    q_latent, kv = q_kv_norm(
        projected.q_latent,
        projected.kv,
        norm_weight(module, "q_a_norm"),
        norm_weight(module, "kv_norm"),
        config.rms_norm_eps,
        backend=backend,
    )
    _check_dtype(q_latent, cache)
    group_step = make_group_step(module.compressor, config, projected, q_latent, step, cache, table, backend)
    group_step.start()
    q = module.q_b_proj(q_latent).view(-1, heads, head_dim)
    q = rotate_and_cache(
        q,
        kv,
        table,
        step.rotary_positions,
        cache.window,
        step.slots,
        q_eps=config.rms_norm_eps if config.normalizes_heads else None,
        out=q,
        cache_format=cache.cache_format,
        backend=backend,
    )
    out = attend_cache(q, config, step, cache, group_step.finish(), module.sinks.float(), backend)
    # Values are rotated keys. The output is rotated back by the query's position, so that its rotation is relative.
    tail = out[..., head_dim - config.rope_dim :]
    inverse = Rotary(rope.inverse_table(rope_table_id, hidden.device), step.rotary_positions, interleaved=True)
    rotate_heads(tail, inverse, out=tail, backend=backend)
    groups = config.o_groups
    weight = o_a.view(groups, config.o_lora_rank, -1)
    grouped = out.new_empty(out.shape[0], groups, config.o_lora_rank)
    by_group = out.view(-1, groups, heads // groups * head_dim).transpose(0, 1)
    bmm_into(by_group, weight.transpose(1, 2), grouped.transpose(0, 1))
    return module.o_b_proj(grouped.flatten(1))


def _check_dtype(q_latent: torch.Tensor, cache: V4Cache) -> None:
    """Check, before keys are stored, that the caches have the dtype of the queries or a quantized format."""
    for name in ("window", "groups"):
        pages = getattr(cache, name)
        if pages is not None and pages.dtype in checks.FLOAT_DTYPES and pages.dtype != q_latent.dtype:
            raise TypeError(
                f"cache.{name} must be quantized or {checks.dtype_names([q_latent.dtype])} like the layer, got "
                f"{checks.dtype_names([pages.dtype])}"
            )


def _check_step(config: V4Config, step: V4Step, cache: V4Cache) -> None:
    """Check that step, layer and caches agree on window, groups, page sizes and positions."""
    if step.window != config.window:
        raise ValueError(f"step must have the layer's window of {config.window} tokens, got {step.window}")
    if config.ratio and config.ratio not in step.groups:
        raise ValueError(f"step must have groups of the layer's {config.ratio} tokens, got {sorted(step.groups)}")
    if step.max_length is not None and step.max_length > config.rope.max_position:
        raise ValueError(
            f"step must have rotary positions below the config's rope.max_position {config.rope.max_position}, got "
            f"{step.max_length - 1}"
        )
    grouped = config.ratio > 0
    for name, needed in (
        ("groups", grouped),
        ("states", config.state_dim > 0),
        ("index_keys", config.selects_groups),
        ("index_states", config.index_state_dim > 0),
    ):
        if needed != (getattr(cache, name) is not None):
            raise ValueError(f"cache.{name} must be {'a tensor' if needed else 'None'} in this layer")
    rows = step.groups[config.ratio].page_size if grouped else step.page_size
    for name, size in (("window", step.page_size), ("groups", rows), ("index_keys", rows)):
        pages = getattr(cache, name)
        if pages is not None and pages.shape[1] != size:
            raise ValueError(f"cache.{name} must have the step's pages of {size}, got {pages.shape[1]}")
    # The two caches of a pair share a block table.
    for name, other in (("index_keys", "groups"), ("index_states", "states")):
        pages, others = getattr(cache, name), getattr(cache, other)
        if pages is not None and pages.shape[:2] != others.shape[:2]:
            raise ValueError(
                f"cache.{name} must have cache.{other}'s {others.shape[0]} pages of {others.shape[1]}, got "
                f"{pages.shape[0]} of {pages.shape[1]}"
            )
    # When kernels are only collected for a GPU (``runtime.precompile``), slots are not computed.
    if machine.device_type(step.slots.device) == "cpu" and not torch.compiler.is_compiling():
        _check_slots("window", step.slots, cache.window)
        if cache.groups is not None and config.stores_groups:
            ends = (step.positions + 1) % config.ratio == 0
            _check_slots("groups", step.groups[config.ratio].slots.where(ends, -1), cache.groups)


def _check_slots(name: str, slots: torch.Tensor, pages: torch.Tensor) -> None:
    """Check that a cache has the pages of new rows. On a GPU slots are not read, and kernels skip invalid ones."""
    page = int(slots.max()) // pages.shape[1]
    if page >= pages.shape[0]:
        raise ValueError(f"cache.{name} must have at least {page + 1} pages for this step, got {pages.shape[0]}")
