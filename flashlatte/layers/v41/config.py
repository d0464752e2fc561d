"""Configuration of a DeepSeek-V4.1 attention layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from flashlatte.layers import models
from flashlatte.layers.config import MAX_SIZE
from flashlatte.layers.rope_config import Rope
from flashlatte.layers.v4.config import V4Config, common_fields, config_names, layer_ratios, layer_ropes
from flashlatte.runtime import checks

MODEL_TYPE = "deepseek_v41"
RATIOS = (0, 1, 2)


@dataclass(frozen=True)
class CandidateConfig:
    """The first level of a two-level indexer: blocks of groups, from which later indexers select.

    Attributes:
        source: the layer whose indexer publishes each query's blocks with the highest scores.
        num_blocks: maximum number of blocks of a query, at most 4,096. The block of its newest group is one of them.
        block_size: groups of a block.
    """

    source: int
    num_blocks: int
    block_size: int

    def __post_init__(self) -> None:
        checks.positive_int("source", self.source, or_zero=True)
        checks.positive_int("num_blocks", self.num_blocks, maximum=4096)
        checks.positive_int("block_size", self.block_size, maximum=MAX_SIZE)


@dataclass(frozen=True)
class V41Config(V4Config):
    """One layer. The computation is that of vLLM 0.33.

    Other differences from DeepSeek-V4: groups do not overlap and have no position bias, index keys are projected from
    groups, and heads of queries are not normalized. The defaults are not those of a checkpoint.

    Attributes:
        ratio: tokens of a group, 1 or 2; 0 in a layer with a window only.
        indexer: sizes of the indexer that selects the layer's groups; None if the ratio is 0.
        layer: number of the layer.
        kv_source: the layer that stores the groups and index keys that this one reads; None if the ratio is 0.
        index_source: the layer whose indexer selects the groups that this one attends to; None if the ratio is 0.
        candidates: the blocks that the layer's indexer publishes, or from which it selects; None: it selects from all
            groups.
    """

    normalizes_heads: ClassVar[bool] = False

    ratio: int = 1
    layer: int = 0
    kv_source: int | None = 0
    index_source: int | None = 0
    candidates: CandidateConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive_int("layer", self.layer, or_zero=True)
        checks.instance("candidates", self.candidates, CandidateConfig, or_none=True)
        if self.ratio not in RATIOS:
            raise ValueError(f"ratio must be 0, 1 or 2, got {self.ratio}")
        for name in ("kv_source", "index_source"):
            source = getattr(self, name)
            if self.ratio == 0 and source is not None:
                raise ValueError(f"{name} must be None in a layer with ratio 0, got {source!r}")
            if self.ratio and checks.positive_int(name, source, or_zero=True) > self.layer:
                raise ValueError(f"{name} must be at most layer {self.layer}, got {source}")
        if self.rope.yarn is not None and self.rope.yarn.rotation_scale != 1:
            raise ValueError(
                f"rope.yarn must not scale the rotation (attention_factor 1.0), got {self.rope.yarn.rotation_scale}"
            )
        if self.ratio and self.indexer is None:
            raise ValueError("indexer must be given in a layer with groups, got None")
        if self.candidates is None:
            return
        if not self.selects_groups or self.candidates.source > self.layer:
            raise ValueError(
                f"candidates must be None in layer {self.layer}, which has no indexer or precedes their source "
                f"{self.candidates.source}"
            )
        if self.indexer is not None and self.candidates.num_blocks * self.candidates.block_size < self.indexer.topk:
            raise ValueError(
                f"candidates must have at least indexer.topk {self.indexer.topk} groups, got "
                f"{self.candidates.num_blocks} blocks of {self.candidates.block_size}"
            )

    @property
    def overlap(self) -> int:
        return 0

    @property
    def stores_groups(self) -> bool:
        return self.kv_source == self.layer

    @property
    def selects_groups(self) -> bool:
        return self.index_source == self.layer

    @property
    def state_dim(self) -> int:
        return 2 * self.head_dim if self.stores_groups and self.ratio > 1 else 0

    @property
    def index_state_dim(self) -> int:
        return 0

    @property
    def publishes_candidates(self) -> bool:
        """Whether the layer's indexer publishes the blocks of ``candidates``."""
        return self.candidates is not None and self.candidates.source == self.layer

    @classmethod
    def layers(cls, config: Any) -> tuple[V41Config, ...]:
        """All layers of a checkpoint's ``config.json`` as a mapping, or of an object with its fields.

        A ``text_config`` within it takes precedence. Source layers are the last of ``kv_source_layer_ids`` and
        ``index_source_layer_ids`` up to a layer.

        Raises:
            TypeError, ValueError: not a config; another model; missing sizes; another ratio; sources that do not fit
                the layers that read them; an unknown rope_type.
        """
        fields = dict(models.config_fields(config))
        if str(fields.get("model_type")).removesuffix("_text") != MODEL_TYPE:
            raise ValueError(f"model_type must be {MODEL_TYPE!r}, got {fields.get('model_type')!r}")
        fields |= models.sub_config(fields, "text_config")
        shared, indexer = common_fields(fields, MODEL_TYPE)
        ratios = layer_ratios(fields, RATIOS)
        ropes = {name: _unscaled(rope) for name, rope in layer_ropes(fields).items()}
        kv_sources = _sources(fields, "kv_source_layer_ids", len(ratios))
        index_sources = _sources(fields, "index_source_layer_ids", len(ratios))
        candidates = _candidates(fields)

        def layer(number: int, ratio: int) -> V41Config:
            source = _last("index_source_layer_ids", index_sources, number) if ratio else None
            uses_candidates = candidates is not None and source == number and candidates.source <= number
            with config_names(fields):
                return cls(
                    **shared,
                    ratio=ratio,
                    indexer=indexer if ratio else None,
                    rope=ropes["compress" if ratio else "main"],
                    layer=number,
                    kv_source=_last("kv_source_layer_ids", kv_sources, number) if ratio else None,
                    index_source=source,
                    candidates=candidates if uses_candidates else None,
                )

        layers = tuple(layer(number, ratio) for number, ratio in enumerate(ratios))
        check_layers(layers)
        for name, sources in (("kv_source_layer_ids", kv_sources), ("index_source_layer_ids", index_sources)):
            if without := [source for source in sources if ratios[source] == 0]:
                raise ValueError(f"{name} must be layers with groups, got {without[0]} with ratio 0")
        if candidates is not None and candidates.source not in index_sources:
            raise ValueError(
                f"candidate_source_layer_id must be one of index_source_layer_ids, got {candidates.source}"
            )
        return layers


def check_layers(layers: Sequence[V41Config]) -> None:
    """Check that the layers of a model store and select what later ones read.

    Raises:
        ValueError: a source layer with another ratio, that stores no groups or has no indexer, or without index keys.
    """
    for number, config in enumerate(layers):
        if config.layer != number:
            raise ValueError(f"layers[{number}].layer must be {number}, got {config.layer}")
        sources = {"kv_source": config.kv_source, "index_source": config.index_source}
        if config.candidates is not None:
            sources["candidates.source"] = config.candidates.source
        for name, source in sources.items():
            if source is not None and layers[source].ratio != config.ratio:
                raise ValueError(
                    f"layers[{number}].{name} must be a layer with ratio {config.ratio}, got {source} with "
                    f"{layers[source].ratio}"
                )
        if config.kv_source is None or config.index_source is None:
            continue
        store = layers[config.kv_source]
        if not store.stores_groups or not layers[config.index_source].selects_groups:
            raise ValueError(
                f"layers[{number}] must have a kv_source that stores groups and an index_source with an indexer, got "
                f"{config.kv_source} and {config.index_source}"
            )
        if config.selects_groups and not store.selects_groups:
            raise ValueError(
                f"layers[{number}].kv_source must have an indexer, whose index keys are read, got {config.kv_source}"
            )


def _unscaled(rope: Rope) -> Rope:
    """DeepSeek-V4.1's YaRN scales neither cosines nor the softmax, whatever a config says."""
    if rope.yarn is None:
        return rope
    return replace(rope, yarn=replace(rope.yarn, mscale=0.0, mscale_all_dim=0.0, attention_factor=1.0))


def _sources(fields: Mapping[str, Any], name: str, count: int) -> list[int]:
    """The source layers among the first ``count`` layers; later ones belong to draft layers (MTP)."""
    sources = [checks.positive_int(name, source, or_zero=True) for source in models.list_of(fields, name)]
    return sorted(source for source in sources if source < count)


def _last(name: str, sources: Sequence[int], layer: int) -> int:
    before = [source for source in sources if source <= layer]
    if not before:
        raise ValueError(f"{name} must have a layer up to {layer}, which has groups, got {list(sources)}")
    return max(before)


def _candidates(fields: Mapping[str, Any]) -> CandidateConfig | None:
    source, count = fields.get("candidate_source_layer_id"), fields.get("candidate_topk_blocks")
    if source is None or checks.integer("candidate_source_layer_id", source) < 0 or not count:
        return None
    with checks.naming(num_blocks="candidate_topk_blocks", block_size="candidate_block_size"):
        return CandidateConfig(source, count, fields.get("candidate_block_size", 0))
