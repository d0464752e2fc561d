"""The guide's table of model families is the generated one."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from flashlatte.engine.model_types import MODEL_TYPES, REFUSED
from flashlatte.engine.text_part import MULTIMODAL
from flashlatte.integrations.transformers import models_table
from flashlatte.layers import models

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "models.md"


def test_the_page_has_the_generated_table():
    page = PAGE.read_text(encoding="utf-8")
    assert models_table.written_into(page) == page, "run python -m flashlatte.integrations.transformers.models_table"


def test_every_family_has_one_row_and_one_answer_for_each_interface():
    names = [row.model_type for row in models_table.rows()]
    assert sorted(names) == sorted({*models.SUPPORTED, "deepseek_v4", "deepseek_v41"})
    assert not set(MODEL_TYPES) & set(REFUSED)
    assert {f"{name}_text" for name in MULTIMODAL} <= set(MODEL_TYPES)
    for row in models_table.rows():
        assert all((row.names, row.layer, row.enable, row.train, row.engine)), row


def test_a_page_without_markers_is_refused():
    with pytest.raises(ValueError, match="page must have the lines"):
        models_table.written_into("# Models\n")
