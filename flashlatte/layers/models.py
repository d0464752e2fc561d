"""Which models' attention is the MLA of this library, by ``model_type``, and what theirs does beside DeepSeek-V3's.

Models that are not served are named with the reason, so that nobody gets a number that is nearly right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

INTERLEAVED, HALF = "interleaved", "half"


@dataclass(frozen=True)
class Traits:
    """What a family's attention does otherwise than DeepSeek-V3's.

    Attributes:
        rope_layout: which rope dims are a pair, whatever the config says; None: as ``rope_interleave`` says, which is
            true where it is not given, and false where it is null.
        rope_theta: base of the frequencies where the config says none.
        scales_queries: whether queries are multiplied by a factor that grows with their position (Mistral 4).
        scales_latents: whether the two normalised latents are multiplied by √(hidden_size / rank) (LongCat-Flash,
            arXiv:2509.01322, §2.1).
        has_indexer: whether an indexer selects the tokens that a query attends to (DeepSeek-V3.2).
        index_rope_layout: which rope dims are a pair in the indexer.
    """

    rope_layout: str | None = None
    rope_theta: float = 10000.0
    scales_queries: bool = False
    scales_latents: bool = False
    has_indexer: bool = False
    index_rope_layout: str = HALF

    def layout(self, rope_interleave: bool | None) -> str:
        if self.rope_layout is not None:
            return self.rope_layout
        return INTERLEAVED if rope_interleave else HALF


SERVED: dict[str, Traits] = {
    "axk1": Traits(),
    "deepseek_v2": Traits(rope_layout=INTERLEAVED),
    "deepseek_v3": Traits(),
    "deepseek_v32": Traits(rope_layout=INTERLEAVED, has_indexer=True),
    "glm4_moe_lite": Traits(),
    "glm_moe_dsa": Traits(rope_layout=INTERLEAVED, has_indexer=True, index_rope_layout=INTERLEAVED),
    "kimi_k2": Traits(),
    "longcat_flash": Traits(rope_layout=INTERLEAVED, rope_theta=1e7, scales_latents=True),
    "minicpm3": Traits(rope_layout=HALF),
    "mistral4": Traits(scales_queries=True),
    "sarvam_mla": Traits(),
    "youtu": Traits(),
}

REFUSED: dict[str, str] = {
    "axk2": "an indexer selects its tokens, and a gate multiplies its attention's output",
    "bailing_hybrid": "a gate multiplies its attention's output, and most of its layers are linear attention",
    "dots3_note": "it normalises the rope part of its keys, gates its attention's output, and has an indexer",
    "glm5_next": "its attention has an indexer whose selection several layers share, and no rotary embedding",
    "hy_v4": "its attention has an indexer, attention sinks and a gate",
    "hy_v4_vl": "its attention has an indexer, attention sinks and a gate",
    "kimi_linear": "most of its layers are linear attention, and its MLA has no rotary embedding",
    "mistral_large4": "its attention has an indexer, shares caches between layers and scales queries by their position",
}


def traits(model_type: str | None) -> Traits:
    """What a family does otherwise; a config without a ``model_type`` is taken for DeepSeek-V3's.

    Raises:
        ValueError: the family's attention is another, or not known to be this one.
    """
    if model_type is None:
        return Traits()
    if not isinstance(model_type, str):
        raise TypeError(f"model_type must be a text, got {model_type!r}")
    if model_type in REFUSED:
        raise ValueError(f"model_type {model_type!r} is not served: {REFUSED[model_type]}")
    if model_type not in SERVED:
        raise ValueError(
            f"model_type must be one of {', '.join(SERVED)}, whose MLA is known to be this one, "
            f"got {model_type!r}: make an MLAConfig by hand if it is"
        )
    return SERVED[model_type]


def fields_of(config: Any) -> dict[str, Any]:
    """What a transformers config, or the content of a ``config.json``, says by name.

    Raises:
        TypeError: it is neither, as a model is, or a path.
    """
    if isinstance(config, Mapping):
        return dict(config)
    if not hasattr(config, "to_dict"):
        what = repr(config) if isinstance(config, str) else type(config).__name__
        raise TypeError(
            f"config must be a transformers config, as a model's .config, or the content of config.json, got {what}"
        )
    return config.to_dict()


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model inside a config of a model that also sees or hears."""
    return inner(config, "text_config") or config


def inner(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object inside a config, empty if there is none."""
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} of a config must be an object, got {value!r}")
    return value


def shared_selections(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers that attend to what the layer before them selected (GLM-5's IndexCache, arXiv:2603.12201).

    A config says it as ``indexer_types`` (transformers), as ``index_topk_pattern`` ("FSSF", S for shared), or as
    ``index_topk_freq`` and ``index_skip_topk_offset``: then layers up to the offset, and every freq-th from there on,
    have an indexer.
    """
    types = config.get("indexer_types") or config.get("index_topk_pattern")
    if types is not None:
        return tuple(layer for layer, kind in enumerate(types) if kind in ("S", "shared"))
    freq = max(config.get("index_topk_freq") or 1, 1)
    offset = config.get("index_skip_topk_offset")
    offset = 2 if offset is None else offset
    return tuple(layer for layer in range(config.get("num_hidden_layers") or 0) if max(layer - offset + 1, 0) % freq)
