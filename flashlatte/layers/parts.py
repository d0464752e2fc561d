"""The parts of an MLA module, of this package or of transformers, by transformers' names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from flashlatte.layers.fused_projections import fused_linear
from flashlatte.layers.weights import linear_weight, norm_weight


class Projections(Protocol):
    """An MLA module of this package or of transformers (DeepseekV2, DeepseekV3, Glm4MoeLite, …).

    It has either ``q_a_proj``, ``q_a_layernorm`` and ``q_b_proj``, or ``q_proj`` (if ``q_lora_rank`` is None); and
    ``kv_a_proj_with_mqa``, ``kv_a_layernorm``, ``kv_b_proj``, ``o_proj``. The projections may hold a subset of the
    layer's heads.

    Parts that only some models have, described in ``MLAConfig``: the output's gate ``g_proj``, ``gate_proj`` or
    ``q_gate_proj`` (which replaces ``q_b_proj``), ``sinks``, ``k_rope_only_layernorm``; and factors of queries
    (``mla_scale_q_lora``, ``q_lora_scale``) and of normalized latents (``mla_scale_kv_lora``, ``kv_lora_scale``).

    Mistral-Large-4 has learned factors of queries, ``softmax_scaling`` (``head_factors``), and layers without
    ``kv_a_proj_with_mqa``: they attend to latents that an earlier layer has stored.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scaling: float
    q_proj: Any
    q_a_proj: Any
    q_a_layernorm: Any
    q_b_proj: Any
    kv_a_proj_with_mqa: Any
    kv_a_layernorm: Any
    kv_b_proj: Any
    o_proj: Any


# Also the parts whose gradients ``layers.training`` computes.
NAMES = frozenset(
    (
        *("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"),
        *("o_proj", "indexer", "g_proj", "gate_proj", "q_gate_proj", "sinks", "k_rope_only_layernorm"),
        "softmax_scaling",
    )
)


@dataclass(frozen=True)
class QueryLatent:
    """The query's latents [T, rank], as projected and normalized."""

    projected: torch.Tensor
    normalized: torch.Tensor


def part(module: Any, name: str) -> Any:
    """A module's part or attribute that only some models have, or None.

    For a missing attribute of a module, ``getattr`` raises an error and catches it, which takes 20 times as long.
    """
    return module._modules.get(name) or module.__dict__.get(name)


def hidden_projections(module: Projections) -> list[Any]:
    """The projections of hidden states, which ``fused_projections`` may compute as one product."""
    query = [module.q_a_proj] if has_query_latent(module) else []
    return [*query, module.kv_a_proj_with_mqa] if owns_latents(module) else query


def has_query_latent(module: Any) -> bool:
    """Whether queries are projected from a latent."""
    return getattr(module, "q_lora_rank", None) is not None


def owns_latents(module: Any) -> bool:
    """Whether the module computes and stores latents; else it reads those of an earlier layer."""
    return module.kv_a_proj_with_mqa is not None


def source_layer(module: Any) -> int:
    """The layer whose latents a module attends to: its own, or the earlier one that its config names."""
    return module.layer_idx if owns_latents(module) else module.config.kv_source_layers[module.layer_idx]


def check_sources(modules: Iterable[Any]) -> None:
    """Raise ValueError if ``kv_source_layers`` differs from the layers whose latents transformers reads.

    In transformers a layer without latents reads those of the last earlier layer that shares its latents and has the
    same rotation.

    Args:
        modules: the attention modules of all layers, in order.
    """
    shared: dict[bool, int] = {}
    for module in modules:
        rotates = module.qk_rope_head_dim > 0
        if owns_latents(module):
            if getattr(module, "store_full_length_kv", False):
                shared[rotates] = module.layer_idx
        elif source_layer(module) != shared.get(rotates):
            raise ValueError(
                f"kv_source_layers must name the last layer before {module.layer_idx} that shares latents and is "
                f"rotated like it, which transformers reads, got {source_layer(module)}"
            )


def check_parts(module: Any) -> None:
    """Raise TypeError for a module with parts that ``forward`` does not compute."""
    found = dict(module.named_children()).keys() | {name for name, _ in module.named_parameters(recurse=False)}
    if unknown := sorted(found - NAMES):
        raise TypeError(f"{type(module).__name__} must have no other parts than MLA's, got {', '.join(unknown)}")


def check_weights(module: Projections, dtype: torch.dtype) -> None:
    """Raise TypeError for a projection or norm whose weight cannot replace a call of the module, in ``dtype``."""
    linear_weight(module, "kv_b_proj", dtype)
    if owns_latents(module):
        norm_weight(module, "kv_a_layernorm")
    if has_query_latent(module):
        norm_weight(module, "q_a_layernorm")
    if key_rope_norm(module) is not None:
        norm_weight(module, "k_rope_only_layernorm")


def eps_of(norm: Any) -> float:
    """The epsilon of an RMSNorm of PyTorch or of transformers."""
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


def key_rope_norm(module: Any) -> Any:
    """The norm of keys' rope dims, or None."""
    return part(module, "k_rope_only_layernorm")


def sinks(module: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
    """[h] in ``dtype``, the logit of each head's sink; None if the model has none."""
    # A DataParallel replica keeps its parameters as attributes.
    found = module._parameters.get("sinks", module.__dict__.get("sinks"))
    return None if found is None else found.to(dtype)


def latent_factor(module: Any) -> float:
    """The factor of normalized latents."""
    return part(module, "mla_scale_kv_lora") or part(module, "kv_lora_scale") or 1.0


def softmax_scale(module: Any) -> float:
    """The softmax scale, including the factor of queries."""
    return module.scaling * (part(module, "mla_scale_q_lora") or part(module, "q_lora_scale") or 1.0)


def head_factors(scaling: Any, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Learned factors [T, h] of queries at positions [T]: scale[i] · ln(p + 1) + bias[i] for head i (Mistral-Large-4).

    Args:
        scaling: a module with parameters ``scale`` and ``bias`` [h].
        dtype: dtype of the queries, in which transformers computes the factors.
    """
    logarithms = (positions + 1).float().log().to(dtype)
    return logarithms[:, None] * scaling.scale.to(dtype) + scaling.bias.to(dtype)


def project_query(
    module: Any, hidden: torch.Tensor, latent: QueryLatent | None, factors: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Unrotated queries [T, h, nope + rope] times ``factors`` [T] or [T, h]; and logits [T, h, 1 or v] of the gate.

    The gate is None if the model has none.
    """
    query_dim = module.qk_nope_head_dim + module.qk_rope_head_dim
    joint = part(module, "q_gate_proj")
    if joint is not None and latent is not None:
        both = joint(torch.cat((latent.normalized, latent.projected), dim=-1))
        query, gate = both.unflatten(-1, (-1, query_dim + module.v_head_dim)).split((query_dim, module.v_head_dim), -1)
        # Rotation is in place, and would otherwise write into a view.
        query = query.contiguous()
    else:
        query = (module.q_proj(hidden) if latent is None else module.q_b_proj(latent.normalized)).unflatten(
            -1, (-1, query_dim)
        )
        gate = _gate_of_hidden(module, hidden)
    if factors is not None:
        query = query * (factors[:, None] if factors.dim() == 1 else factors).to(query.dtype)[..., None]
    return query, gate


def _gate_of_hidden(module: Any, hidden: torch.Tensor) -> torch.Tensor | None:
    for name, width in (("g_proj", 1), ("gate_proj", module.v_head_dim)):
        projection = part(module, name)
        if projection is not None:
            return fused_linear(hidden, projection)[0].unflatten(-1, (-1, width))
    return None


def project_output(module: Any, out: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """``o_proj`` of attention's outputs [..., h, v], which are first multiplied by the sigmoid of ``gate``."""
    if gate is not None:
        out = out * torch.sigmoid(gate).to(out.dtype)
    return module.o_proj(out.flatten(-2))
