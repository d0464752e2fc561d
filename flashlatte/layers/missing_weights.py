"""Detects weights that a checkpoint lacks, which transformers would initialize at random."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

# Maximum number of names in a message.
_MAX_LISTED = 8


def check_stored(path: str | Path, config: Any, dtypes: Mapping[str, str]) -> None:
    """Raise ValueError for missing weights that transformers does not report, or does not report by name.

    Args:
        config: a transformers config.
        dtypes: safetensors' dtypes of the checkpoint's tensors, by transformers' names.
    """
    # Experts after these are identities (LongCat-Flash).
    count = config.n_routed_experts if getattr(config, "zero_expert_num", None) else None
    missing = set(_missing_experts(dtypes, count))
    quantization = getattr(config, "quantization_config", None) or {}
    quantization = quantization if isinstance(quantization, Mapping) else quantization.to_dict()
    if quantization.get("quant_method") == "fp8":
        missing.update(_missing_scales(dtypes))
    check_complete(path, missing)


def _missing_experts(names: Iterable[str], count: int | None = None) -> Iterator[str]:
    """Weights that some experts of a layer have and others lack; transformers stacks experts into one tensor.

    Args:
        count: number of experts with weights; None: derived from the names.
    """
    experts: dict[str, set[tuple[int, str]]] = defaultdict(set)
    for name in names:
        found = re.match(r"(.*\.experts\.)(\d+)\.(.+)", name)
        if found is not None and (count is None or int(found[2]) < count):
            experts[found[1]].add((int(found[2]), found[3]))
    for before, those in experts.items():
        parts, present = {part for _, part in those}, max(index for index, _ in those) + 1
        for index in range(present if count is None else count):
            yield from (f"{before}{index}.{part}" for part in sorted(parts) if (index, part) not in those)


def _missing_scales(dtypes: Mapping[str, str]) -> Iterator[str]:
    """Missing scales of float8 weights; without them the raw float8 values would be used as weights."""
    scaled = {name.partition("_scale")[0] for name in dtypes if "_scale" in name}
    for name, dtype in dtypes.items():
        if dtype == "F8_E4M3" and "_scale" not in name and name not in scaled:
            yield f"{name}_scale_inv"


def check_loaded(
    path: str | Path,
    model: Any,
    missing: Collection[str],
    unused: Iterable[str],
    mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]] = (),
) -> None:
    """Raise ValueError unless every weight of a transformers model, with its biases and scales, was loaded.

    Args:
        missing: weights of the model that the checkpoint lacks.
        unused: tensors of the checkpoint that the model lacks.
        mismatched: weights of the model, with their shape in the checkpoint and in the model.
    """
    unused = own_tensors(model, unused)
    # Ignoring the bias or scale of a weight would change the layer's result.
    parts = [name for name in unused if re.search(r"(bias|\.weight_\w+)$", name) and _has_weight(model, name)]
    check_complete(path, missing, unused if missing else parts, mismatched)


def check_complete(
    path: str | Path,
    missing: Collection[str],
    unused: Collection[str] = (),
    mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]] = (),
) -> None:
    """Raise ValueError if any of these is not empty; arguments as for ``check_loaded``."""
    problems = [f"it lacks {_list_names(missing)}"] if missing else []
    if unused:
        problems.append(f"it has {_list_names(unused)}, which the model does not use")
    problems += [
        f"it has {name} of shape {list(stored)}, and the config gives {list(wanted)}"
        for name, stored, wanted in sorted(mismatched)[:_MAX_LISTED]
    ]
    if problems:
        raise ValueError(
            f"model must be a checkpoint with the weights of its config, and {path} is not: {'; '.join(problems)}"
        )


def own_tensors(model: Any, names: Iterable[str]) -> list[str]:
    """The tensors of a checkpoint without those of layers after the model's last (multi-token prediction)."""
    count = model.config.get_text_config().num_hidden_layers
    layers = {name: re.search(r"(?:^|\.)layers\.(\d+)\.", name) for name in names}
    return sorted(name for name, layer in layers.items() if layer is None or int(layer[1]) < count)


def _has_weight(model: nn.Module, name: str) -> bool:
    """Whether the module that holds the named tensor has a weight."""
    try:
        return hasattr(model.get_submodule(name.rpartition(".")[0]), "weight")
    except AttributeError:
        return False


def _list_names(names: Collection[str]) -> str:
    """The first names, and the number of the others."""
    shown = ", ".join(sorted(names)[:_MAX_LISTED])
    return shown + (f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else "")


def warn_of_missing(decoder: nn.Module, head: nn.Module | None) -> None:
    """Warn of weights of a loaded model that its checkpoint lacked and transformers initialized.

    It is not an error, since the caller may have set their values later. transformers marks the parameters that it
    loaded and the modules that it finished. Models that it did not load have no marks, quantized models only some.
    """
    if getattr(getattr(decoder, "config", None), "quantization_config", None) is not None:
        return
    marked = {True: list[str](), False: list[str]()}
    for name_of_part, part in (("model", decoder), ("lm_head", head)):
        for before, module in part.named_modules(prefix=name_of_part) if part is not None else ():
            # Modules that were added later, such as adapters, have no mark.
            if not getattr(module, "_is_hf_initialized", False):
                continue
            for name, parameter in module.named_parameters(before, recurse=False):
                # accelerate replaces offloaded weights by meta tensors.
                if not parameter.is_meta:
                    marked[getattr(parameter, "_is_hf_initialized", False)].append(name)
    if marked[True] and marked[False]:
        warnings.warn(
            "the model's checkpoint lacked weights, which transformers initialized at random; unless they were set "
            f"later, outputs are wrong: {_list_names(marked[False])}",
            stacklevel=3,
        )
