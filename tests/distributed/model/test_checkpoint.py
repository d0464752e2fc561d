"""One rank's part of a checkpoint, read as slices, compared with the same part of the whole model."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import fp8_linears
from support.engine_models import model
from transformers import AutoConfig, AutoModelForCausalLM

from flashlatte.distributed.model.checkpoint import Slices
from flashlatte.distributed.model.ranks import Ranks
from flashlatte.engine.model import Model
from flashlatte.engine.v4 import V4Model


def ranks(rank: int, size: int) -> Ranks:
    """Fake ranks with the attributes that a model needs before a step."""

    def share(count: int) -> tuple[int, int]:
        return rank * count // size, (rank + 1) * count // size

    facts = {"rank": rank, "size": size, "is_leader": rank == 0, "kv_ranks": 1, "device": torch.device("cpu")}
    return cast("Ranks", SimpleNamespace(**facts, share=share))


def weights(made: Model | V4Model) -> dict[str, torch.Tensor]:
    return made._body.state_dict(prefix="model.") | made._head.state_dict(prefix="lm_head.")


FAMILIES = ("DeepseekV2", "DeepseekV32", "GlmMoeDsa", "Glm4MoeLite", "AXK1", "AXK2", "HYV4", "Youtu")


@pytest.mark.parametrize("family", ["DeepseekV3", *(pytest.param(name, marks=pytest.mark.full) for name in FAMILIES)])
def test_each_rank_reads_its_part(family, tmp_path):
    """Three ranks have 1, 1 and 2 of 4 heads, and slices of different sizes of each MLP."""
    whole, size = model(family), 3
    whole.save_pretrained(tmp_path)
    for rank in range(size):
        cut, read = (Model(source, ranks=ranks(rank, size)) for source in (copy.deepcopy(whole), tmp_path))
        want, got = weights(cut), weights(read)
        assert got.keys() == want.keys()
        for name, weight in want.items():
            assert got[name].dtype == weight.dtype
            assert got[name].equal(weight), name


def test_sinks_are_not_divided_between_ranks_that_share_the_keys():
    shared = ranks(0, 2)
    vars(shared)["kv_ranks"] = 2
    with pytest.raises(ValueError, match=r"^context_parallel must be 1 for a hy_v4: attention sinks .*, got 2$"):
        Model(model("HYV4"), ranks=shared)


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.float32])
@pytest.mark.parametrize("family", ["DeepseekV3", *(pytest.param(name, marks=pytest.mark.full) for name in FAMILIES)])
def test_dtypes(family, dtype, tmp_path):
    """Weights in the stored or in the given dtype; those that transformers keeps in float32 (a router's correction)
    stay float32."""
    copy.deepcopy(model(family)).bfloat16().save_pretrained(tmp_path)
    read = weights(Model(tmp_path, dtype=dtype, ranks=ranks(0, 2)))
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype or "auto")
    cut = weights(Model(whole, ranks=ranks(0, 2)))
    assert {name: weight.dtype for name, weight in read.items()} == {name: cut[name].dtype for name in read}
    assert read["model.embed_tokens.weight"].dtype == (dtype or torch.bfloat16)


@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("family", ["DeepseekV3", pytest.param("GlmMoeDsa", marks=pytest.mark.full)])
def test_float8_weights_are_split_between_blocks(family, kept, scale_fmt, tmp_path, monkeypatch):
    """With their scales if the device supports fp8 products, else dequantized."""
    made = copy.deepcopy(model(family, **fp8_linears.SIZES)).bfloat16()
    fp8_linears.save(made, tmp_path, scale_fmt=scale_fmt)
    if kept:
        fp8_linears.keep_quantized(monkeypatch)
    whole, size = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto"), 2
    assert kept == (whole.model.layers[1].mlp.experts.down_proj.dtype == torch.float8_e4m3fn)
    for rank in range(size):
        assert Slices.of(tmp_path, AutoConfig.from_pretrained(tmp_path), None, "cpu") is not None
        cut, read = (Model(source, ranks=ranks(rank, size)) for source in (whole, tmp_path))
        want, got = weights(cut), weights(read)
        assert got.keys() == want.keys()
        for name, weight in want.items():
            assert (got[name].dtype, got[name].shape) == (weight.dtype, weight.shape)
            assert got[name].float().equal(weight.float()), name


def test_blocks_are_not_split(tmp_path, monkeypatch):
    """16 of a head's 24 query elements form a block."""
    fp8_linears.save(model(**fp8_linears.SIZES | {"qk_rope_head_dim": 8}), tmp_path)
    fp8_linears.keep_quantized(monkeypatch)
    message = r"^tensor_parallel must divide quantized weights at multiples .* 16, got 0 to 24 of 96 in a FP8Linear$"
    with pytest.raises(ValueError, match=message):
        Model(tmp_path, ranks=ranks(0, 4))
    monkeypatch.undo()
    assert weights(Model(tmp_path, ranks=ranks(0, 4)))["model.layers.0.self_attn.q_b_proj.weight"].shape == (24, 32)


def test_experts_that_are_too_small_are_not_split(tmp_path):
    """transformers' grouped product requires rows of a multiple of 16 bytes; its loop over experts supports any."""
    small = copy.deepcopy(model(moe_intermediate_size=12))
    small.save_pretrained(tmp_path)
    for source in (small, tmp_path):
        with pytest.raises(ValueError, match=r"a multiple of 4 inner dims of an expert, got 0 to 6 of 12: "):
            Model(source, ranks=ranks(0, 2))
    small.set_experts_implementation("eager")
    assert weights(Model(small, ranks=ranks(0, 2)))["model.layers.1.mlp.experts.down_proj"].shape == (4, 64, 6)


def test_blocks_of_experts_are_not_split(tmp_path, monkeypatch):
    """6 heads can be divided over 3 ranks, but not the two blocks of an expert's inner dims."""
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 6}
    fp8_linears.save(model(**fp8_linears.SIZES | sizes), tmp_path)
    fp8_linears.keep_quantized(monkeypatch)
    message = r"^tensor_parallel must divide quantized weights .*, got 0 to 10 of 32 in a FP8Experts$"
    with pytest.raises(ValueError, match=message):
        Model(tmp_path, ranks=ranks(0, 3))


@pytest.mark.parametrize("part", ["self_attn.o_proj", "mlp.up_proj"])
def test_adapters_are_not_split(part):
    class Adapted(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + x.sum()

    changed = copy.deepcopy(model())
    layer = changed.model.layers[0]
    linear = layer.get_submodule(part)
    layer.set_submodule(part, Adapted(linear.in_features, linear.out_features, bias=False))
    with pytest.raises(
        TypeError, match=r"^tensor_parallel above 1 needs plain linear layers, got Adapted: merge adapte"
    ):
        Model(changed, ranks=ranks(0, 2))


class Beside(torch.nn.Module):
    """A bottleneck adapter around a module, or low-rank matrices added to a linear layer."""

    def __init__(self, base: torch.nn.Module, inputs: int = 64, outputs: int = 64) -> None:
        super().__init__()
        self.base, self.down, self.up = base, torch.nn.Linear(inputs, 2), torch.nn.Linear(2, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize(
    ("part", "sizes"), [("mlp", ()), ("mlp.shared_experts", ()), ("mlp.shared_experts.down_proj", (32, 64))]
)
def test_weights_that_every_rank_would_add_are_rejected(part, sizes):
    changed = copy.deepcopy(model())
    layer = changed.model.layers[1]
    layer.set_submodule(part, Beside(layer.get_submodule(part), *sizes))
    with pytest.raises(TypeError, match=r"^tensor_parallel above 1 needs MLPs of a router.*: merge adapters first$"):
        Model(changed, ranks=ranks(0, 2))


def test_an_mlp_of_other_weights_is_refused():
    changed = copy.deepcopy(model())
    changed.model.layers[1].mlp = torch.nn.Linear(64, 64)
    with pytest.raises(TypeError, match=r" up_proj and down_proj, got weights of a Linear: merge adapters first$"):
        Model(changed, ranks=ranks(0, 2))


def test_packed_weights_are_refused():
    """Weights as in a linear layer of compressed-tensors."""
    changed = copy.deepcopy(model())
    packed = changed.model.layers[1].mlp.shared_experts.up_proj
    del packed.weight
    packed.weight_packed = torch.nn.Parameter(torch.zeros(32, 8, dtype=torch.int32), requires_grad=False)
    message = r"needs weights that are not quantized, .*up_proj\.weight_packed of torch\.int32$"
    with pytest.raises(ValueError, match=message):
        Model(changed, ranks=ranks(0, 2))


@pytest.mark.parametrize("part", ["mlp.shared_experts", "mlp.experts", "mlp.shared_experts.up_proj"])
def test_hooks_that_would_get_partial_data_are_rejected(part):
    changed = copy.deepcopy(model())
    hooked = changed.model.layers[1].get_submodule(part)
    hooked.register_forward_hook(lambda *called: called[2] + 1)
    message = rf"^tensor_parallel above 1 needs modules without .*, got hooks on a {type(hooked).__name__}$"
    with pytest.raises(TypeError, match=message):
        Model(changed, ranks=ranks(0, 2))


@pytest.mark.parametrize("part", ["mlp", "mlp.shared_experts", "mlp.shared_experts.up_proj", "self_attn.q_b_proj"])
def test_a_replaced_forward_of_a_sliced_module_is_rejected(part):
    """In the sliced copy it would still compute with the weights of the whole model."""
    changed = copy.deepcopy(model())
    replaced = changed.model.layers[1].get_submodule(part)
    before = replaced.forward
    replaced.forward = lambda x: 1.5 * before(x)
    with pytest.raises(TypeError, match=rf", got another forward on a {type(replaced).__name__}$"):
        Model(changed, ranks=ranks(0, 2))


def test_hooks_of_an_mlp_get_the_sum():
    changed = copy.deepcopy(model())
    seen = []
    changed.model.layers[1].mlp.register_forward_hook(lambda *called: seen.append(called[2]))
    cut = Model(changed, ranks=ranks(0, 2))
    cast("Any", cut.ranks).sum = lambda part: torch.full_like(part, 3)
    got = cut._body.layers[1].mlp(torch.ones(1, 2, 64))
    assert got.eq(3).all()
    assert seen[0].eq(3).all()


def tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


@pytest.mark.parametrize("family", ["DeepseekV3", "DeepseekV4"])
def test_a_split_model_is_not_copied_whole(family, monkeypatch):
    """The model does not change, and the copy shares no memory with it."""
    whole = copy.deepcopy(model(family))
    before = [(id(tensor), tensor.data_ptr(), tensor.shape, tensor.requires_grad) for tensor in tensors(whole)]
    monkeypatch.setattr(torch.nn.Parameter, "__deepcopy__", lambda *_: pytest.fail("a weight was copied whole"))
    cut = (V4Model if family == "DeepseekV4" else Model)(whole, ranks=ranks(1, 2))
    assert before == [(id(tensor), tensor.data_ptr(), tensor.shape, tensor.requires_grad) for tensor in tensors(whole)]
    theirs = {tensor.untyped_storage().data_ptr() for tensor in tensors(whole)}
    for tensor in (*tensors(cut._body), *tensors(cut._head)):
        assert tensor.untyped_storage().data_ptr() not in theirs


def test_a_model_with_a_device_map_is_not_moved(monkeypatch):
    """accelerate's ``to`` is an attribute of the model, and would move the model itself even if called on a copy."""
    accelerate = pytest.importorskip("accelerate")
    spread = copy.deepcopy(model())
    parts = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head")
    monkeypatch.setattr(type(spread), "to", lambda *_: pytest.fail("the model was moved"))
    accelerate.dispatch_model(spread, dict.fromkeys(parts, "cpu"), main_device="cpu", force_hooks=True)
    cut = Model(spread, ranks=ranks(1, 2))
    # The weights are on another device than the one to which these would move their argument.
    assert not any(hasattr(module, "_hf_hook") for module in cut._body.modules())
    assert hasattr(spread.model.layers[1].mlp, "_hf_hook")


def test_weights_of_other_ranks_are_not_read(tmp_path, monkeypatch):
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


def test_tied_embeddings_are_one_weight(tmp_path):
    """Also if they are created with another dtype or device than the file's."""
    model("Youtu", tie_word_embeddings=True).save_pretrained(tmp_path)
    read = Model(tmp_path, dtype=torch.bfloat16, ranks=ranks(0, 2))
    assert read._head.weight.data_ptr() == read._body.embed_tokens.weight.data_ptr()


def test_unknown_tensor_names_are_left_to_transformers(tmp_path, monkeypatch):
    model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name.removeprefix("model."): weight for name, weight in load_file(file).items()}, file, {"format": "pt"})
    assert Slices.of(tmp_path, model().config, None, "cpu") is None
    got, want = weights(Model(tmp_path, ranks=ranks(0, 2))), weights(Model(model(), ranks=ranks(0, 2)))
    assert all(got[name].equal(weight) for name, weight in want.items())


def test_experts_in_one_tensor_are_left_to_transformers(tmp_path):
    model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = {name: weight for name, weight in load_file(file).items() if ".experts." not in name}
    experts = {name: weight.clone() for name, weight in model().state_dict().items() if ".experts." in name}
    save_file(stored | experts, file, {"format": "pt"})
    assert Slices.of(tmp_path, model().config, None, "cpu") is None
    got, want = weights(Model(tmp_path, ranks=ranks(0, 2))), weights(Model(model(), ranks=ranks(0, 2)))
    assert all(got[name].equal(weight) for name, weight in want.items())


def test_an_adapter_in_the_directory_is_loaded_by_transformers(tmp_path):
    """With peft, transformers applies the adapter, and non-plain layers are then rejected."""
    model().save_pretrained(tmp_path)
    assert Slices.of(tmp_path, model().config, None, "cpu") is not None
    (tmp_path / "adapter_config.json").write_text("{}")
    assert Slices.of(tmp_path, model().config, None, "cpu") is None


def test_the_file_that_transformers_would_read(tmp_path):
    """A directory may still contain the files of an older save, and their index."""
    changed = copy.deepcopy(model())
    with torch.no_grad():
        changed.lm_head.weight.mul_(2)
    changed.save_pretrained(tmp_path, max_shard_size="100KB")
    index = (tmp_path / "model.safetensors.index.json").read_text()
    assert Slices.of(tmp_path, model().config, None, "cpu") is not None
    model().save_pretrained(tmp_path / "whole")
    (tmp_path / "whole" / "model.safetensors").rename(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path)
    got = weights(Model(tmp_path, ranks=ranks(0, 2)))
    assert whole.lm_head.weight.equal(model().lm_head.weight)
    assert got["lm_head.weight"].equal(whole.lm_head.weight)


def test_a_weight_of_another_shape(tmp_path):
    model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    changed = load_file(file)
    changed["model.norm.weight"] = torch.ones(65)
    save_file(changed, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.norm\.weight must have the shape \[64\] .*, got \[65\]"):
        Model(tmp_path, ranks=ranks(0, 2))
