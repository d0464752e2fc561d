"""A rank's part of a checkpoint, read as slices, against the same part of the whole model."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine_models import model
from transformers import AutoModelForCausalLM

from flashlatte.distributed.model.checkpoint import Slices
from flashlatte.distributed.model.ranks import Ranks
from flashlatte.engine.model import Model


def ranks(rank: int, size: int) -> Ranks:
    """What a model asks of them before a step."""

    def share(count: int) -> tuple[int, int]:
        return rank * count // size, (rank + 1) * count // size

    facts = {"rank": rank, "size": size, "leads": rank == 0, "keys_over": 1, "device": torch.device("cpu")}
    return cast("Ranks", SimpleNamespace(**facts, share=share))


def weights(made: Model) -> dict[str, torch.Tensor]:
    return made._body.state_dict(prefix="model.") | made._head.state_dict(prefix="lm_head.")


FAMILIES = ("DeepseekV2", "DeepseekV32", "GlmMoeDsa", "Glm4MoeLite", "AXK1", "Youtu")


@pytest.mark.parametrize("family", ["DeepseekV3", *(pytest.param(name, marks=pytest.mark.full) for name in FAMILIES)])
def test_each_rank_reads_its_part(family, tmp_path):
    """Three ranks have 1, 1 and 2 of 4 heads, and of each MLP parts that differ too."""
    whole, size = model(family), 3
    whole.save_pretrained(tmp_path)
    for rank in range(size):
        cut, read = (Model(source, ranks=ranks(rank, size)) for source in (copy.deepcopy(whole), tmp_path))
        want, got = weights(cut), weights(read)
        assert got.keys() == want.keys()
        for name, weight in want.items():
            assert got[name].dtype == weight.dtype
            assert got[name].equal(weight), name


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.float32])
@pytest.mark.parametrize("family", ["DeepseekV3", *(pytest.param(name, marks=pytest.mark.full) for name in FAMILIES)])
def test_dtypes(family, dtype, tmp_path):
    """Weights as stored, or as asked; what transformers keeps in float32 (a router's correction) all the same."""
    copy.deepcopy(model(family)).bfloat16().save_pretrained(tmp_path)
    read = weights(Model(tmp_path, dtype=dtype, ranks=ranks(0, 2)))
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype or "auto")
    cut = weights(Model(whole, ranks=ranks(0, 2)))
    assert {name: weight.dtype for name, weight in read.items()} == {name: cut[name].dtype for name in read}
    assert read["model.embed_tokens.weight"].dtype == (dtype or torch.bfloat16)


def test_what_others_have_is_not_read(tmp_path, monkeypatch):
    model().save_pretrained(tmp_path)
    numbers = 0
    read = Slices._part

    def counting(*arguments: Any) -> torch.Tensor:
        nonlocal numbers
        part = read(*arguments)
        numbers += part.numel()
        return part

    monkeypatch.setattr(Slices, "_part", counting)
    made = Model(tmp_path, ranks=ranks(1, 4))
    assert numbers == sum(weight.numel() for weight in weights(made).values())
    assert numbers < 0.5 * sum(weight.numel() for weight in model().state_dict().values())


def test_names_of_its_own_are_transformers_business(tmp_path, monkeypatch):
    model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name.removeprefix("model."): weight for name, weight in load_file(file).items()}, file, {"format": "pt"})
    assert Slices.of(tmp_path, model().config, None) is None
    got, want = weights(Model(tmp_path, ranks=ranks(0, 2))), weights(Model(model(), ranks=ranks(0, 2)))
    assert all(got[name].equal(weight) for name, weight in want.items())


def test_a_weight_of_another_shape(tmp_path):
    model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    changed = load_file(file)
    changed["model.norm.weight"] = torch.ones(65)
    save_file(changed, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"model has model\.norm\.weight of shape \[65\], and its config wants \[64\]"):
        Model(tmp_path, ranks=ranks(0, 2))
