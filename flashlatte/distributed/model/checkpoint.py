"""One rank's part of a checkpoint, read as slices of its files: what others have takes no time and no memory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from flashlatte.distributed.model.ranks import Ranks
from flashlatte.distributed.model.shards import inner_share

_INDEX = "model.safetensors.index.json"
_STORED = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# transformers' name of a module, and another that checkpoints have for it.
_RENAMED = ("mlp.post_mlp_layernorm.", "post_mlp_layernorm.")
_EXPERTS = ".experts."


class Slices:
    """A directory of safetensors, of which nothing is read until it is asked for.

    Attributes:
        model: the transformers model of the directory without its weights: its tensors are on PyTorch's meta device.
    """

    def __init__(self, path: Path, config: Any, dtype: torch.dtype | None) -> None:
        from safetensors import safe_open
        from transformers import AutoModelForCausalLM, GenerationConfig

        self._files = {file: safe_open(file, framework="pt") for file in _files(path)}
        self._places = {name: file for file, opened in self._files.items() for name in opened.keys()}  # noqa: SIM118
        with torch.device("meta"):
            self.model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype or self._dtype(config)).eval()
        if (path / "generation_config.json").is_file():
            self.model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
        # Only transformers' own attention rotates by it.
        self.model.model.rotary_emb = None

    @classmethod
    def of(cls, path: str | Path, config: Any, dtype: torch.dtype | None) -> Slices | None:
        """None where transformers alone can read it: other files, quantised weights, names of its own.

        Args:
            dtype: of the weights; None: as the config says, or as stored.
        """
        if getattr(config, "quantization_config", None) is not None or not _files(Path(path)):
            return None
        slices = cls(Path(path), config, dtype)
        known = all(slices._sources(name) for name in slices.model.state_dict())
        return slices if known and all(slices._stored(name) in _STORED for name in slices._places) else None

    def fill(self, ranks: Ranks, heads: int, device: torch.device | str) -> None:
        """Read what the model still has after it was cut to a rank's part.

        Args:
            heads: of the whole model.

        Raises:
            ValueError: a weight of another shape than the config says.
        """
        in_float32 = _kept_in_float32(self.model)
        values = {}
        for name, target in self.model.state_dict().items():
            # Heads are dealt whole.
            count = heads if ".self_attn." in name else None
            dtype = torch.float32 if any(re.search(pattern, name) for pattern in in_float32) else target.dtype
            values[name] = self._read(name, target.shape, ranks, count).to(device, dtype)
        self.model.load_state_dict(values, assign=True)
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)

    def _read(self, name: str, shape: torch.Size, ranks: Ranks, count: int | None) -> torch.Tensor:
        sources = self._sources(name)
        if not name.endswith("gate_up_proj") and len(sources) == 1:
            return self._part(name, sources[0], shape, ranks, count)
        whole = torch.empty(shape, dtype=_STORED[self._stored(sources[0])])
        # Of each expert one source, or two whose rows lie one after the other.
        sources_of_one = len(sources) // shape[0]
        for number, source in enumerate(sources):
            expert, half = divmod(number, sources_of_one)
            into = whole[expert].chunk(sources_of_one)[half]
            into.copy_(self._part(name, source, into.shape, ranks, count))
        return whole

    def _part(self, name: str, source: str, shape: torch.Size, ranks: Ranks, count: int | None) -> torch.Tensor:
        """What this rank has of a tensor: of the axis that is longer there, its share, of ``count`` heads if given."""
        stored = self._files[self._places[source]].get_slice(source)
        cut = []
        for size, here in zip(stored.get_shape(), shape, strict=True):
            if size == here:
                first, end = 0, size
            elif count is None:
                first, end = inner_share(ranks, size)
            else:
                first, end = (edge * size // count for edge in ranks.share(count))
            cut.append(slice(first, end))
        part = stored[tuple(cut)] if cut else stored[:]
        if part.shape != shape:
            raise ValueError(
                f"model has {source} of shape {stored.get_shape()}, and its config wants {list(shape)} of {name} on "
                f"rank {ranks.rank} of {ranks.size}"
            )
        return part

    def _sources(self, name: str) -> list[str]:
        """The tensors of the files that a tensor of the model is made of; none where they are not known."""
        if name == "lm_head.weight" and self.model.config.tie_word_embeddings:
            name = "model.embed_tokens.weight"
        renamed = name.replace(*_RENAMED)
        for known in (name, renamed):
            if known in self._places:
                return [known]
        before, _, part = name.partition(_EXPERTS)
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(part, ())
        experts = self.model.config.n_routed_experts if parts else 0
        sources = [f"{before}{_EXPERTS}{expert}.{one}.weight" for expert in range(experts) for one in parts]
        return sources if all(source in self._places for source in sources) else []

    def _stored(self, name: str) -> str:
        return self._files[self._places[name]].get_slice(name).get_dtype()

    def _dtype(self, config: Any) -> torch.dtype:
        return config.dtype or _STORED.get(self._stored(next(iter(self._places))), torch.float32)


def _kept_in_float32(model: Any) -> set[str]:
    """Which weights transformers reads in float32: patterns of their names, some for float16 only."""
    patterns = set[str]()
    if model.dtype in (torch.float16, torch.bfloat16):
        patterns.update(model._keep_in_fp32_modules_strict or ())
    if model.dtype == torch.float16:
        patterns.update(model._keep_in_fp32_modules or ())
    return patterns


def _files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint, none where it has others."""
    index = path / _INDEX
    if index.is_file():
        return sorted({path / file for file in json.loads(index.read_text())["weight_map"].values()})
    return [file for file in (path / "model.safetensors",) if file.is_file()]
