"""One rank's part of a checkpoint, read as slices of its files: what others have takes no time and no memory."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch

from flashlatte.distributed.model.cuts import numbers_of_one, piece_of, scales_name
from flashlatte.distributed.model.names import in_transformers
from flashlatte.distributed.model.ranks import Ranks
from flashlatte.distributed.model.shards import inner_share
from flashlatte.layers.checkpoint import opened, safetensors_files
from flashlatte.layers.missing import check_loaded, check_stored, own_tensors
from flashlatte.layers.quantised import times_scales

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_STORED = _FLOATS | {"I64": torch.int64, "I32": torch.int32}
# Weights and scales of a checkpoint that says that it is quantised.
_FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu}
# Two numbers of four bits to a byte.
_FOUR_BITS = {"I8": torch.int8}
_EXPERTS = ".experts."
# One weight where a config ties them.
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Slices:
    """A directory of safetensors, of which nothing is read until it is asked for.

    Attributes:
        model: the transformers model of the directory without its weights: its tensors are on PyTorch's meta device.
    """

    def __init__(self, path: Path, config: Any, dtype: torch.dtype | None, quantiser: Any = None) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig

        self._files = {file: opened(file) for file in _files(path)}
        # Of transformers' names the file, and the name there.
        self._places = {
            in_transformers(stored, config.model_type): (file, stored)
            for file, opened in self._files.items()
            for stored in opened.keys()  # noqa: SIM118 (safe_open is no mapping)
        }
        self._dtypes = _STORED | ({} if quantiser is None else _FLOAT8)
        if quantiser is not None and not quantiser.quantization_config.dequantize:
            self._dtypes |= _FOUR_BITS
        with torch.device("meta"):
            self.model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype or self._dtype(config)).eval()
        self._quantiser: Any = quantiser
        if quantiser is not None:
            quantiser.preprocess_model(self.model, dtype=self.model.dtype)
        if (path / "generation_config.json").is_file():
            self.model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
        # Only transformers' own attention rotates by them.
        for module in self.model.modules():
            if hasattr(module, "rotary_emb"):
                module.rotary_emb = None

    @classmethod
    def of(cls, path: str | Path, config: Any, dtype: torch.dtype | None, device: torch.device | str) -> Slices | None:
        """None where transformers alone can read it: other files, an adapter beside them, other quantised weights than
        float8 with scales of blocks, names of its own.

        Args:
            dtype: of the weights; None: as the config says, or as stored. Of float8 ones, where they are dequantised.
            device: where they are to be.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is damaged, or weights are missing (``check_stored``, ``check_loaded``).
        """
        quantised = getattr(config, "quantization_config", None) is not None
        quantiser = _float8_quantiser(config, torch.device(device)) if quantised else None
        if not _files(Path(path)) or (quantised and quantiser is None):
            return None
        slices = cls(Path(path), config, dtype, quantiser)
        return slices if slices._has_all(path) and all(map(slices._is_readable, slices._places)) else None

    def fill(self, ranks: Ranks, heads: int, device: torch.device | str) -> None:
        """Read what the model still has after it was cut to a rank's part.

        Args:
            heads: of the whole model, or groups of heads that stay together.

        Raises:
            ValueError: a weight of another shape than the config says.
        """
        in_float32 = _kept_in_float32(self.model)
        values: dict[str, torch.Tensor] = {}
        for name, target in self.model.state_dict().items():
            if name == _HEAD and self._is_tied:
                values[name] = values[_EMBEDDING]
                continue
            # Heads are dealt whole.
            count = heads if ".self_attn." in name else None
            kept = any(re.search(pattern, name) for pattern in in_float32) and target.dtype.itemsize > 1
            values[name] = self._read(name, target, ranks, count).to(device, torch.float32 if kept else target.dtype)
        self.model.load_state_dict(values, assign=True)
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)

    def _has_all(self, path: str | Path) -> bool:
        """Whether the files have all tensors of the model under known names; ValueError if none can be of others."""
        check_stored(path, self.model.config, {name: self._stored(name) for name in self._places})
        sources = {name: self._sources(name) for name in self.model.state_dict()}
        missing = [name for name, found in sources.items() if not found]
        used = {source for found in sources.values() for source in found}
        used |= {scales_name(source) for source in used}
        unused = [name for name in self._places if name not in used]
        ignored = "|".join(self.model._keys_to_ignore_on_load_missing or ["(?!)"])
        if missing and (own_tensors(self.model, unused) or any(re.search(ignored, name) for name in missing)):
            return False
        check_loaded(path, self.model, missing, unused)
        return True

    @property
    def _is_tied(self) -> bool:
        return self.model.config.tie_word_embeddings

    def _read(self, name: str, target: torch.Tensor, ranks: Ranks, count: int | None) -> torch.Tensor:
        sources = self._sources(name)
        if target.dim() < 3:
            return self._part(name, sources[0], target, ranks, count)
        stored = self._dtypes[self._stored(sources[0])]
        whole = torch.empty(target.shape, dtype=target.dtype if stored in _FLOAT8.values() else stored)
        # Of each expert one source, or two whose rows lie one after the other.
        sources_of_one = len(sources) // target.shape[0]
        for number, source in enumerate(sources):
            expert, half = divmod(number, sources_of_one)
            into = whole[expert].chunk(sources_of_one)[half]
            into.copy_(self._part(name, source, into, ranks, count))
        return whole

    def _part(self, name: str, source: str, target: torch.Tensor, ranks: Ranks, count: int | None) -> torch.Tensor:
        """What this rank has of a tensor: of the axis that is longer there, its share, of ``count`` heads if given.

        A float8 weight is dequantised for a ``target`` of another dtype.
        """
        stored = self._slice(source)
        cut = []
        for axis, (size, here) in enumerate(zip(stored.get_shape(), target.shape, strict=True)):
            first, end = (0, size) if size == here else self._share(name, axis, size, ranks, count)
            cut.append(slice(first, end))
        part = stored[tuple(cut)] if cut else stored[:]
        if part.shape != target.shape:
            raise ValueError(
                f"model has {source} of shape {stored.get_shape()}, and its config wants {list(target.shape)} of "
                f"{name} on rank {ranks.rank} of {ranks.size}"
            )
        if part.dtype != torch.float8_e4m3fn or target.dtype == part.dtype:
            return part
        scales = self._slice(scales_name(source))[:]
        block = self._quantiser.quantization_config.weight_block_size
        return times_scales(part, scales, block, (cut[0].start, cut[1].start)).to(target.dtype)

    def _share(self, name: str, axis: int, size: int, ranks: Ranks, count: int | None) -> tuple[int, int]:
        """(first, end) of this rank's share of an axis, as ``keep_heads`` and ``divide_mlp`` have cut it."""
        parent, _, own = name.rpartition(".")
        module = self.model.get_submodule(parent)
        each = numbers_of_one(module, own, axis)
        if count is None:
            first, end = inner_share(ranks, size * each, piece_of(module))
        else:
            first, end = (edge * size * each // count for edge in ranks.share(count))
        return first // each, end // each

    def _sources(self, name: str) -> list[str]:
        """The tensors of the files that a tensor of the model is made of; none where they are not known."""
        if name == _HEAD and self._is_tied:
            name = _EMBEDDING
        before, _, part = name.partition(_EXPERTS)
        part, scales, _ = part.partition("_scale_inv")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(part)
        if parts is None:
            return [name] if name in self._places else []
        experts = range(self.model.config.n_routed_experts)
        sources = [f"{before}{_EXPERTS}{expert}.{one}.weight{scales}" for expert in experts for one in parts]
        return sources if all(source in self._places for source in sources) else []

    def _is_readable(self, name: str) -> bool:
        stored = self._stored(name)
        has_scales = scales_name(name) in self._places
        return stored in self._dtypes and (has_scales or stored not in ("F8_E4M3", "I8"))

    def _stored(self, name: str) -> str:
        return self._slice(name).get_dtype()

    def _slice(self, name: str) -> Any:
        file, stored = self._places[name]
        return self._files[file].get_slice(stored)

    def _dtype(self, config: Any) -> torch.dtype:
        return config.dtype or _FLOATS.get(self._stored(next(iter(self._places))), torch.float32)


def _float8_quantiser(config: Any, device: torch.device) -> Any:
    """What makes transformers' layers of float8 weights with scales of blocks, or leaves a model as it is for weights
    that are dequantised, as a CPU or an older GPU needs it; None where a checkpoint is quantised in another way.
    """
    from transformers.quantizers.auto import AutoHfQuantizer

    asked = copy.deepcopy(config.quantization_config)
    if (asked if isinstance(asked, dict) else asked.to_dict()).get("quant_method") != "fp8":
        return None
    quantiser: Any = AutoHfQuantizer.from_config(asked, pre_quantized=True)
    if quantiser.quantization_config.weight_block_size is None:
        return None
    quantiser.quantization_config.dequantize |= device.type == "cpu"
    quantiser.validate_environment(device_map=device)
    return quantiser


def _kept_in_float32(model: Any) -> set[str]:
    """Which weights transformers reads in float32: patterns of their names, some for float16 only."""
    patterns = set[str]()
    if model.dtype in (torch.float16, torch.bfloat16):
        patterns.update(model._keep_in_fp32_modules_strict or ())
    if model.dtype == torch.float16:
        patterns.update(model._keep_in_fp32_modules or ())
    return patterns


def _files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint that transformers would read, none where it has others, or an adapter."""
    return [] if (path / "adapter_config.json").is_file() else safetensors_files(path)
