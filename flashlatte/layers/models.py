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
        max_position: positions of a model where the config says none.
        scales_queries: whether queries are multiplied by a factor that grows with their position (Mistral 4).
        scales_latents: whether the two normalised latents are multiplied by √(hidden_size / rank) (LongCat-Flash,
            arXiv:2509.01322, §2.1).
        has_indexer: whether an indexer selects the tokens that a query attends to (DeepSeek-V3.2).
        index_rope_layout: which rope dims are a pair in the indexer.
    """

    rope_layout: str | None = None
    rope_theta: float = 10000.0
    max_position: int = 4096
    scales_queries: bool = False
    scales_latents: bool = False
    has_indexer: bool = False
    index_rope_layout: str = HALF

    def layout(self, rope_interleave: bool | None) -> str:
        if self.rope_layout is not None:
            return self.rope_layout
        return INTERLEAVED if rope_interleave else HALF


SERVED: dict[str, Traits] = {
    "axk1": Traits(max_position=32768),
    "deepseek_v2": Traits(rope_layout=INTERLEAVED, max_position=2048),
    "deepseek_v3": Traits(),
    "deepseek_v32": Traits(rope_layout=INTERLEAVED, max_position=163840, has_indexer=True),
    "glm4_moe_lite": Traits(max_position=202752),
    "glm_moe_dsa": Traits(
        rope_layout=INTERLEAVED, max_position=202752, has_indexer=True, index_rope_layout=INTERLEAVED
    ),
    "kimi_k2": Traits(),
    "longcat_flash": Traits(rope_layout=INTERLEAVED, rope_theta=1e7, max_position=131072, scales_latents=True),
    "minicpm3": Traits(rope_layout=HALF, max_position=32768),
    "mistral4": Traits(max_position=1048576, scales_queries=True),
    "sarvam_mla": Traits(),
    "youtu": Traits(max_position=131072),
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
    check_not_refused(model_type)
    if model_type not in SERVED:
        raise ValueError(
            f"model_type must be one of {', '.join(SERVED)}, whose MLA is known to be this one, "
            f"got {model_type!r}: make an MLAConfig by hand if it is"
        )
    return SERVED[model_type]


def refusal(model_type: object) -> str | None:
    """Why a family is not served, if it is one of ``REFUSED`` or the language model within one; else None."""
    return REFUSED.get(model_type.removesuffix("_text")) if isinstance(model_type, str) else None


def check_not_refused(*model_types: object) -> None:
    """Raise ValueError, with the reason, if one of the types is of a family that is not served."""
    for model_type in model_types:
        if (reason := refusal(model_type)) is not None:
            raise ValueError(f"model_type {model_type!r} is not served: {reason}")


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


def rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config says of its rotary embedding; empty if nothing.

    ``rope_scaling`` (checkpoints) takes precedence over ``rope_parameters`` (transformers 5), as in transformers.
    """
    return inner(config, "rope_scaling") or inner(config, "rope_parameters")


def standardised_rope(parameters: Mapping[str, Any], rope_theta: Any, original: Any) -> dict[str, Any]:
    """``rope_parameters`` with the fields that a config may leave out, filled in as transformers does.

    Args:
        parameters: of one rotary embedding.
        rope_theta: used where ``parameters`` has none.
        original: YaRN's ``original_max_position_embeddings``, used where ``parameters`` has none.

    Raises:
        ValueError: a rope_type other than "default" and "yarn".
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    # The name in Sarvam's checkpoints.
    kind = "yarn" if kind == "deepseek_yarn" else kind
    if kind not in ("default", "yarn"):
        raise ValueError(f"rope_type must be default or yarn, got {kind!r}")
    defaults = {"rope_theta": rope_theta}
    if kind == "yarn":
        defaults["original_max_position_embeddings"] = original
    return defaults | dict(parameters) | {"rope_type": kind}


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
