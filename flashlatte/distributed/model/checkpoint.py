"""Reads one rank's part of a checkpoint as slices of its safetensors files."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch

from flashlatte.distributed.model.partition import elements_per_entry, min_slice, scales_name
from flashlatte.distributed.model.ranks import Ranks
from flashlatte.distributed.model.shards import inner_range
from flashlatte.distributed.model.weight_names import in_transformers
from flashlatte.layers.checkpoint import open_safetensors, safetensors_files
from flashlatte.layers.missing_weights import check_loaded, check_stored, own_tensors
from flashlatte.layers.quantized import apply_block_scales

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_STORED = _FLOATS | {"I64": torch.int64, "I32": torch.int32}
# Dtypes of weights and scales in a quantized checkpoint.
_FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu}
# Two 4-bit elements packed into a byte.
_MXFP4 = {"I8": torch.int8}
_EXPERTS = ".experts."
# The same weight if the config ties word embeddings.
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Slices:
    """A checkpoint directory whose tensors are read as slices, on demand.

    Attributes:
        model: the transformers model of the checkpoint on PyTorch's meta device.
    """

    def __init__(self, path: Path, config: Any, dtype: torch.dtype | None, quantizer: Any = None) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig

        self._files = {file: open_safetensors(file) for file in _files(path)}
        # The file, and the tensor's name in it, by transformers' names.
        self._sources_by_name = {
            in_transformers(stored, config.model_type): (file, stored)
            for file, tensors in self._files.items()
            for stored in tensors.keys()  # noqa: SIM118 (safe_open is no mapping)
        }
        self._dtypes = _STORED | ({} if quantizer is None else _FLOAT8)
        if quantizer is not None and not quantizer.quantization_config.dequantize:
            self._dtypes |= _MXFP4
        with torch.device("meta"):
            self.model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype or self._dtype(config)).eval()
        self._quantizer: Any = quantizer
        if quantizer is not None:
            quantizer.preprocess_model(self.model, dtype=self.model.dtype)
        if (path / "generation_config.json").is_file():
            self.model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
        # Only transformers' own attention uses the rotary embeddings.
        for module in self.model.modules():
            if hasattr(module, "rotary_emb"):
                module.rotary_emb = None

    @classmethod
    def of(cls, path: str | Path, config: Any, dtype: torch.dtype | None, device: torch.device | str) -> Slices | None:
        """Open a checkpoint, or return None if only transformers can load it.

        That is the case for files other than safetensors, an adapter, quantized weights other than float8 with block
        scales, and unknown tensor names.

        Args:
            dtype: dtype of the weights, and of dequantized float8 weights; None: the config's, or as stored.
            device: target device.

        Raises:
            FileNotFoundError: a missing file.
            ValueError: a damaged file, or missing weights (``check_stored``, ``check_loaded``).
        """
        quantized = getattr(config, "quantization_config", None) is not None
        quantizer = _float8_quantizer(config, torch.device(device)) if quantized else None
        if not _files(Path(path)) or (quantized and quantizer is None):
            return None
        slices = cls(Path(path), config, dtype, quantizer)
        return (
            slices if slices._has_all_weights(path) and all(map(slices._is_readable, slices._sources_by_name)) else None
        )

    def fill(self, ranks: Ranks, heads: int, device: torch.device | str) -> None:
        """Load the weights of ``model`` after it was partitioned for a rank.

        Args:
            heads: number of heads of the whole model, or of groups of heads that are not divided.

        Raises:
            ValueError: a weight whose shape does not match the config.
        """
        in_float32 = _kept_in_float32(self.model)
        values: dict[str, torch.Tensor] = {}
        for name, target in self.model.state_dict().items():
            if name == _HEAD and self._is_tied:
                values[name] = values[_EMBEDDING]
                continue
            # Attention weights are divided between heads.
            count = heads if ".self_attn." in name else None
            kept = any(re.search(pattern, name) for pattern in in_float32) and target.dtype.itemsize > 1
            values[name] = self._read(name, target, ranks, count).to(device, torch.float32 if kept else target.dtype)
        self.model.load_state_dict(values, assign=True)
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)

    def _has_all_weights(self, path: str | Path) -> bool:
        """Whether all tensors of the model are found by known names; ValueError if no unknown name could be one."""
        check_stored(path, self.model.config, {name: self._stored(name) for name in self._sources_by_name})
        sources = {name: self._sources(name) for name in self.model.state_dict()}
        missing = [name for name, found in sources.items() if not found]
        used = {source for found in sources.values() for source in found}
        used |= {scales_name(source) for source in used}
        unused = [name for name in self._sources_by_name if name not in used]
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
        # Each expert has one source, or two whose rows are concatenated.
        sources_of_one = len(sources) // target.shape[0]
        for number, source in enumerate(sources):
            expert, half = divmod(number, sources_of_one)
            into = whole[expert].chunk(sources_of_one)[half]
            into.copy_(self._part(name, source, into, ranks, count))
        return whole

    def _part(self, name: str, source: str, target: torch.Tensor, ranks: Ranks, count: int | None) -> torch.Tensor:
        """This rank's slice of a tensor along the axis that is longer than in ``target``, divided as ``count`` heads if
        given.

        A float8 weight is dequantized if ``target`` has another dtype.
        """
        stored = self._slice(source)
        cut = []
        for axis, (size, here) in enumerate(zip(stored.get_shape(), target.shape, strict=True)):
            first, end = (0, size) if size == here else self._share(name, axis, size, ranks, count)
            cut.append(slice(first, end))
        part = stored[tuple(cut)] if cut else stored[:]
        if part.shape != target.shape:
            raise ValueError(
                f"{source} must have the shape {list(target.shape)} that the config gives {name} on rank {ranks.rank} "
                f"of {ranks.size}, got {stored.get_shape()}"
            )
        if part.dtype != torch.float8_e4m3fn or target.dtype == part.dtype:
            return part
        scales = self._slice(scales_name(source))[:]
        block = self._quantizer.quantization_config.weight_block_size
        return apply_block_scales(part, scales, block, (cut[0].start, cut[1].start)).to(target.dtype)

    def _share(self, name: str, axis: int, size: int, ranks: Ranks, count: int | None) -> tuple[int, int]:
        """(first, end) of this rank's slice of an axis, as partitioned by ``keep_heads`` and ``divide_mlp``."""
        parent, _, own = name.rpartition(".")
        module = self.model.get_submodule(parent)
        elements = elements_per_entry(module, own, axis)
        if count is None:
            first, end = inner_range(ranks, size * elements, min_slice(module))
        else:
            first, end = (edge * size * elements // count for edge in ranks.share(count))
        return first // elements, end // elements

    def _sources(self, name: str) -> list[str]:
        """The stored tensors that form a tensor of the model; empty if they are unknown."""
        if name == _HEAD and self._is_tied:
            name = _EMBEDDING
        before, _, part = name.partition(_EXPERTS)
        part, scales, _ = part.partition("_scale_inv")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(part)
        if parts is None:
            return [name] if name in self._sources_by_name else []
        experts = range(self.model.config.n_routed_experts)
        sources = [f"{before}{_EXPERTS}{expert}.{one}.weight{scales}" for expert in experts for one in parts]
        return sources if all(source in self._sources_by_name for source in sources) else []

    def _is_readable(self, name: str) -> bool:
        stored = self._stored(name)
        has_scales = scales_name(name) in self._sources_by_name
        return stored in self._dtypes and (has_scales or stored not in ("F8_E4M3", "I8"))

    def _stored(self, name: str) -> str:
        return self._slice(name).get_dtype()

    def _slice(self, name: str) -> Any:
        file, stored = self._sources_by_name[name]
        return self._files[file].get_slice(stored)

    def _dtype(self, config: Any) -> torch.dtype:
        return config.dtype or _FLOATS.get(self._stored(next(iter(self._sources_by_name))), torch.float32)


def _float8_quantizer(config: Any, device: torch.device) -> Any:
    """transformers' quantizer of float8 weights with block scales; None for other quantized checkpoints.

    On a CPU or an older GPU it dequantizes, and does not change the model's layers.
    """
    from transformers.quantizers.auto import AutoHfQuantizer

    quantization = copy.deepcopy(config.quantization_config)
    if (quantization if isinstance(quantization, dict) else quantization.to_dict()).get("quant_method") != "fp8":
        return None
    quantizer: Any = AutoHfQuantizer.from_config(quantization, pre_quantized=True)
    if quantizer.quantization_config.weight_block_size is None:
        return None
    quantizer.quantization_config.dequantize |= device.type == "cpu"
    quantizer.validate_environment(device_map=device)
    return quantizer


def _kept_in_float32(model: Any) -> set[str]:
    """Name patterns of weights that transformers loads in float32; some apply to float16 only."""
    patterns = set[str]()
    if model.dtype in (torch.float16, torch.bfloat16):
        patterns.update(model._keep_in_fp32_modules_strict or ())
    if model.dtype == torch.float16:
        patterns.update(model._keep_in_fp32_modules or ())
    return patterns


def _files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint that transformers would load; empty for other files, or an adapter."""
    return [] if (path / "adapter_config.json").is_file() else safetensors_files(path)
