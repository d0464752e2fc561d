"""The supported MLA families by ``model_type``, and the differences of their attention from DeepSeek-V3's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flashlatte.runtime import checks

# A layer has a config of its own, which takes about 50 µs to read.
MAX_LAYERS = 1024
INTERLEAVED, HALF, UNROTATED = "interleaved", "half", "none"


@dataclass(frozen=True)
class Traits:
    """Differences of a family's attention to DeepSeek-V3's.

    Attributes:
        names: models of the family, for the table of the guide.
        has_layers: whether layers differ in sizes and kinds, so that a config describes one of them.
        also: differences that ``MLAConfig`` does not describe, for the same table.
        layer_refusal: why ``MLAConfig`` cannot describe the family, which ``enable`` supports; None if it can.
        runs_as: family whose transformers classes the models use; None: this one.
        rope_layout: layout of the rope dims, whatever the config says. None: by the config's ``rope_interleave``,
            which defaults to true; null counts as false.
        rope_theta: default base of the frequencies.
        max_position: default number of positions.
        scales_queries: whether queries are multiplied by a factor that grows with their position (Mistral 4).
        scales_latents: whether the two normalized latents are multiplied by √(hidden_size / rank) (LongCat-Flash,
            arXiv:2509.01322, §2.1).
        yarn_scales_softmax: whether YaRN's ``mscale_all_dim`` also scales the softmax.
        model_eps: whether the norms of latents have the config's ``rms_norm_eps`` instead of 1e-6.
        output_gate, attn_sink, key_rope_norm: as in ``MLAConfig``.
        has_indexer: whether an indexer selects the tokens that a query attends to (DeepSeek-V3.2).
        index_rope_layout: layout of the rope dims in the indexer.
        index_rope_last: whether these are the last dims of a head.
        index_frequency: default of ``index_topk_freq``.
        index_model_eps: whether the norm of index keys has the config's ``rms_norm_eps`` instead of 1e-6.
    """

    names: str = ""
    runs_as: str | None = None
    has_layers: bool = False
    also: str = ""
    layer_refusal: str | None = None
    rope_layout: str | None = None
    rope_theta: float = 10000.0
    max_position: int = 4096
    scales_queries: bool = False
    scales_latents: bool = False
    has_indexer: bool = False
    index_rope_layout: str = HALF
    index_rope_last: bool = False
    index_frequency: int = 1
    index_model_eps: bool = False
    yarn_scales_softmax: bool = True
    model_eps: bool = False
    output_gate: str | None = None
    attn_sink: bool = False
    key_rope_norm: bool = False

    def layout(self, rope_interleave: bool | None) -> str:
        if self.rope_layout is not None:
            return self.rope_layout
        return INTERLEAVED if rope_interleave else HALF


_HY4 = Traits(
    "Hy4 preview",
    rope_layout=HALF,
    max_position=262144,
    has_indexer=True,
    index_rope_last=True,
    index_frequency=4,
    index_model_eps=True,
    output_gate="channel",
    attn_sink=True,
)
SUPPORTED: dict[str, Traits] = {
    "axk1": Traits("A.X K1", max_position=32768),
    "axk2": Traits("A.X-K2", rope_layout=INTERLEAVED, max_position=131072, has_indexer=True, output_gate="query"),
    "bailing_hybrid": Traits(
        "Ling-3.0", rope_layout=INTERLEAVED, rope_theta=6e6, max_position=262144, output_gate="head"
    ),
    "deepseek_v2": Traits("DeepSeek-V2, V2-Lite", rope_layout=INTERLEAVED, max_position=2048),
    "deepseek_v3": Traits("DeepSeek-V3, V3.1, R1"),
    "deepseek_v32": Traits("DeepSeek-V3.2", rope_layout=INTERLEAVED, max_position=163840, has_indexer=True),
    "dots3_note": Traits(
        "dots3-note",
        also="layers with windows and other sizes between",
        has_layers=True,
        rope_layout=INTERLEAVED,
        rope_theta=8e7,
        max_position=524288,
        scales_latents=True,
        has_indexer=True,
        index_rope_layout=INTERLEAVED,
        yarn_scales_softmax=False,
        model_eps=True,
        output_gate="head",
        key_rope_norm=True,
    ),
    "glm4_moe_lite": Traits("GLM-4.7-Flash", max_position=202752),
    "glm5_next": Traits(
        "GLM-5.3-Flash",
        also="the selected tokens are pools",
        layer_refusal="its indexer selects pools of tokens",
        rope_layout=UNROTATED,
        max_position=1048576,
        has_indexer=True,
        model_eps=True,
    ),
    "glm_moe_dsa": Traits(
        "GLM-5", rope_layout=INTERLEAVED, max_position=202752, has_indexer=True, index_rope_layout=INTERLEAVED
    ),
    "hy_v4": _HY4,
    # transformers rotates other dims than in Hy4 preview.
    "hy_v4_vl": replace(
        _HY4, names="Hy4, with vision", rope_layout=INTERLEAVED, index_rope_layout=INTERLEAVED, model_eps=True
    ),
    "kimi_k2": Traits("Kimi K2, and the language model of Kimi K2.5", runs_as="deepseek_v3"),
    "kimi_linear": Traits("Kimi Linear", rope_layout=UNROTATED, max_position=1048576),
    "longcat_flash": Traits(
        "LongCat-Flash", rope_layout=INTERLEAVED, rope_theta=1e7, max_position=131072, scales_latents=True
    ),
    "minicpm3": Traits("MiniCPM3", rope_layout=HALF, max_position=32768),
    "mistral_large4": Traits(
        "Mistral Large 4",
        also="learned factors of queries by head and position; some layers are not rotated; latents are shared",
        layer_refusal="the frequencies of its rotation are learned, and no config has them",
        rope_layout=INTERLEAVED,
        max_position=1048576,
        has_indexer=True,
        index_rope_layout=INTERLEAVED,
        model_eps=True,
    ),
    "mistral4": Traits("Mistral 4, also in a vision model", max_position=1048576, scales_queries=True),
    "sarvam_mla": Traits("Sarvam-105B", runs_as="deepseek_v3"),
    "youtu": Traits("Youtu-LLM", max_position=131072),
}

# Names of layer types in configs of transformers before 5.18, and the current ones.
_FORMER_LAYER_TYPES = {"deepseek_sparse_attention": "indexed_attention"}


def traits(model_type: str | None) -> Traits:
    """The traits of a family; DeepSeek-V3's if ``model_type`` is None.

    Raises:
        ValueError: an unknown family, or one that no ``MLAConfig`` describes.
    """
    if model_type is None:
        return Traits()
    if not isinstance(model_type, str):
        raise TypeError(f"model_type must be a str, got {model_type!r}")
    check_described(model_type)
    found = supported(model_type)
    if found is None:
        raise ValueError(
            f"model_type must be one of {', '.join(SUPPORTED)}, got {model_type!r}: if its attention is "
            "DeepSeek-V3's MLA, construct an MLAConfig directly"
        )
    return found


def supported(model_type: str) -> Traits | None:
    """The traits of a supported family, or of the language model of one; else None."""
    return SUPPORTED.get(model_type.removesuffix("_text"))


def check_described(*model_types: object) -> None:
    """Raise ValueError with the reason if no ``MLAConfig`` describes one of the types."""
    for model_type in model_types:
        found = supported(model_type) if isinstance(model_type, str) else None
        if found is not None and found.layer_refusal is not None:
            raise ValueError(f"model_type {model_type!r} is not supported: {found.layer_refusal}")


def config_fields(config: Any) -> dict[str, Any]:
    """The fields of a transformers config, or of the content of a ``config.json``.

    Raises:
        TypeError: another object, such as a model or a path.
    """
    if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        what = repr(config) if isinstance(config, str) else type(config).__name__
        raise TypeError(
            f"config must be a transformers config (a model's .config), or the content of config.json, got {what}"
        )
    fields = dict(config) if isinstance(config, Mapping) else config.to_dict()
    return _with_current_layer_types(fields)


def _with_current_layer_types(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, also of nested configs, with former names of layer types replaced."""
    renamed: dict[str, Any] = {
        name: _with_current_layer_types(dict(x)) for name, x in fields.items() if isinstance(x, Mapping)
    }
    if isinstance(fields.get("layer_types"), (list, tuple)):
        renamed["layer_types"] = [_FORMER_LAYER_TYPES.get(str(kind), kind) for kind in fields["layer_types"]]
    return fields | renamed


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model in a multimodal model's config; the config itself for others."""
    return sub_config(config, "text_config") or config


def sub_config(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A nested object of a config; empty if missing."""
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} of a config must be an object, got {value!r}")
    return value


def num_layers(config: Mapping[str, Any]) -> int:
    """The number of layers of a config.

    Raises:
        TypeError, ValueError: ``num_hidden_layers`` is not from 1 to 1,024.
    """
    return checks.positive_int("num_hidden_layers", config.get("num_hidden_layers"), maximum=MAX_LAYERS)


def list_of(config: Mapping[str, Any], name: str) -> list[Any]:
    """A list of a config; empty if missing."""
    value = config.get(name)
    if value is not None and not isinstance(value, (list, tuple)):
        raise TypeError(f"{name} must be a list, got {type(value).__name__}")
    return list(value or ())


def rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary embedding's parameters of a config; empty if missing.

    ``rope_scaling`` (checkpoints) takes precedence over ``rope_parameters`` (transformers 5), as in transformers.
    """
    return sub_config(config, "rope_scaling") or sub_config(config, "rope_parameters")


def standardized_rope(parameters: Mapping[str, Any], rope_theta: Any, original: Any) -> dict[str, Any]:
    """``rope_parameters`` with missing fields filled in as transformers does.

    Args:
        parameters: parameters of one rotary embedding.
        rope_theta: default of ``rope_theta``.
        original: default of YaRN's ``original_max_position_embeddings``.

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


def shared_selection_layers(config: Mapping[str, Any], frequency: int = 1) -> tuple[int, ...]:
    """Layers that reuse the selection of the layer before (GLM-5's IndexCache, arXiv:2603.12201).

    A config defines them by ``indexer_types`` (transformers), by ``index_topk_pattern`` ("FSSF", S for shared), or by
    ``index_topk_freq`` (default ``frequency``) and ``index_skip_topk_offset``: layers up to the offset, and every
    freq-th layer after it, have an indexer.

    Raises:
        TypeError, ValueError: a field of another type; a first layer that shares.
    """
    types = list_of(config, "indexer_types") or config.get("index_topk_pattern")
    if types is not None:
        if not isinstance(types, (str, list, tuple)):
            raise TypeError(f"index_topk_pattern must be a str or a list, got {type(types).__name__}")
        shared = tuple(layer for layer, kind in enumerate(types) if kind in ("S", "shared"))
    else:
        freq = max(checks.integer("index_topk_freq", config.get("index_topk_freq") or frequency), 1)
        offset = config.get("index_skip_topk_offset")
        offset = 2 if offset is None else checks.integer("index_skip_topk_offset", offset)
        count = 0 if config.get("num_hidden_layers") is None else num_layers(config)
        shared = tuple(layer for layer in range(count) if max(layer - offset + 1, 0) % freq)
    if 0 in shared:
        raise ValueError(
            "layer 0 must have an indexer, by indexer_types, index_topk_pattern, or index_topk_freq and "
            "index_skip_topk_offset"
        )
    return shared
