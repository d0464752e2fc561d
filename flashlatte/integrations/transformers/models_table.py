"""Generates the table of model families in ``docs/guide/models.md`` from the code that decides which are supported.

``python -m flashlatte.integrations.transformers.models_table docs/guide/models.md`` writes it into the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flashlatte.engine import model_types
from flashlatte.engine.text_part import MULTIMODAL
from flashlatte.integrations.transformers.families import FAMILIES
from flashlatte.layers import models
from flashlatte.layers.v4.config import MODEL_TYPE as V4_MODEL_TYPE
from flashlatte.layers.v41.config import MODEL_TYPE as V41_MODEL_TYPE

BEGIN, END = "<!-- models: begin -->", "<!-- models: end -->"
_YES = "yes"


@dataclass(frozen=True)
class FamilyRow:
    """One row of the table: a family of models.

    Attributes:
        names: models of the family.
        model_type: its name in configs.
        attention: how its attention differs from DeepSeek-V3's.
        layer, enable, train, engine: "yes", or the reason why it is not supported.
    """

    names: str
    model_type: str
    attention: str
    layer: str
    enable: str
    train: str
    engine: str


def rows() -> Iterator[FamilyRow]:
    """A row for each known family, supported or not, by model type."""
    enabled = {family.model_type: family for family in FAMILIES}
    for name, traits in models.SUPPORTED.items():
        if (traits.runs_as or name) not in enabled:
            raise ValueError(f"enable must support every family that the layer supports, got {name}")
        if name in MULTIMODAL:
            engine = "yes, of tokens only"
        else:
            engine = _YES if name in model_types.MODEL_TYPES else model_types.REFUSED[name]
        family = enabled[traits.runs_as or name]
        attention = _attention(traits, linear=family.linear is not None)
        layer, train = traits.layer_refusal or _YES, family.training_refusal or _YES
        yield FamilyRow(traits.names, name, attention, layer, _YES, train, engine)
    attention = "512 elements a token; window and compressed tokens in one softmax, sinks"
    yield FamilyRow("DeepSeek-V4", V4_MODEL_TYPE, attention, "`V4Attention`", _YES, _YES, _YES)
    attention = "as DeepSeek-V4; layers share groups and selections, and the indexer has two levels"
    reason = model_types.REFUSED[V41_MODEL_TYPE]
    no_model = "transformers has no such model"
    yield FamilyRow("DeepSeek-V4.1-Flash", V41_MODEL_TYPE, attention, "`V41Attention`", no_model, no_model, reason)


def _attention(traits: models.Traits, *, linear: bool) -> str:
    """The supported differences from DeepSeek-V3's attention."""
    gates = {"head": "a gate for each head", "channel": "a gate for each value dim", "query": "a gate from q_gate_proj"}
    found = {
        "an indexer selects tokens": traits.has_indexer,
        gates.get(traits.output_gate or "", ""): traits.output_gate is not None,
        "sinks": traits.attn_sink,
        "no rotation": traits.rope_layout == models.UNROTATED,
        "latents are scaled": traits.scales_latents,
        "queries are scaled by position": traits.scales_queries,
        "keys' rope dims are normalized": traits.key_rope_norm,
        "layers of linear attention between": linear,
        traits.also: bool(traits.also),
    }
    return "; ".join(text for text, applies in found.items() if applies)


def table() -> str:
    """The table in Markdown."""
    header = ("models", "`model_type`", "difference to DeepSeek-V3's MLA", "layer", "`enable`", "train", "engine")
    lines = [header, ("---",) * len(header)]
    for row in sorted(rows(), key=lambda row: row.model_type):
        lines.append((row.names, f"`{row.model_type}`", row.attention, row.layer, row.enable, row.train, row.engine))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def written_into(page: str) -> str:
    """``page`` with the current table between its markers.

    Raises:
        ValueError: the page has no markers.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"page must have the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(written_into(path.read_text(encoding="utf-8")), encoding="utf-8")
