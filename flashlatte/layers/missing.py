"""Weights that a transformers model has and its checkpoint does not, which transformers initialises at random."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

# Names that a message gives.
_LISTED = 8


def check_stored(path: str | Path, config: Any, dtypes: Mapping[str, str]) -> None:
    """Raise ValueError for weights whose absence transformers does not report by name, or not at all.

    Args:
        config: of transformers.
        dtypes: of the checkpoint's tensors, in safetensors' words, by transformers' names for them.
    """
    missing = set(_missing_experts(dtypes))
    quantization = getattr(config, "quantization_config", None) or {}
    quantization = quantization if isinstance(quantization, Mapping) else quantization.to_dict()
    if quantization.get("quant_method") == "fp8":
        missing.update(_missing_scales(dtypes))
    check_complete(path, missing)


def _missing_experts(names: Iterable[str]) -> Iterator[str]:
    """Weights that some experts of a layer have and others, up to the last, do not: experts become one tensor."""
    experts: dict[str, set[tuple[int, str]]] = defaultdict(set)
    for name in names:
        if (found := re.match(r"(.*\.experts\.)(\d+)\.(.+)", name)) is not None:
            experts[found[1]].add((int(found[2]), found[3]))
    for before, those in experts.items():
        parts, count = {part for _, part in those}, max(number for number, _ in those) + 1
        for number in range(count):
            yield from (f"{before}{number}.{part}" for part in sorted(parts) if (number, part) not in those)


def _missing_scales(dtypes: Mapping[str, str]) -> Iterator[str]:
    """Scales of float8 weights, which would be taken for the weights themselves."""
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
    """Raise ValueError unless a transformers model has every weight from a checkpoint, with its biases and scales.

    Args:
        missing: weights of the model that the checkpoint lacks.
        unused: tensors of the checkpoint that the model does not have.
        mismatched: weights of the model, with their shape in the checkpoint and in the model.
    """
    unused = own_tensors(model, unused)
    # A bias or a scale beside a weight is part of the layer's computation.
    parts = [name for name in unused if re.search(r"(bias|\.weight_\w+)$", name) and _has_weight(model, name)]
    check_complete(path, missing, unused if missing else parts, mismatched)


def check_complete(
    path: str | Path,
    missing: Collection[str],
    unused: Collection[str] = (),
    mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]] = (),
) -> None:
    """Raise ValueError that names these, if there is one; as in ``check_loaded``."""
    problems = [f"it lacks {_listed(missing)}"] if missing else []
    if unused:
        problems.append(f"it has {_listed(unused)}, which the model does not use")
    problems += [
        f"it has {name} of shape {list(stored)}, and the config gives {list(wanted)}"
        for name, stored, wanted in sorted(mismatched)[:_LISTED]
    ]
    if problems:
        raise ValueError(
            f"model must be a checkpoint with the weights of its config, and {path} is not: {'; '.join(problems)}"
        )


def own_tensors(model: Any, names: Iterable[str]) -> list[str]:
    """Those of a checkpoint's tensors that are not of layers behind the model's last, which draft tokens (MTP)."""
    count = model.config.num_hidden_layers
    layers = {name: re.search(r"(?:^|\.)layers\.(\d+)\.", name) for name in names}
    return sorted(name for name, layer in layers.items() if layer is None or int(layer[1]) < count)


def _has_weight(model: nn.Module, name: str) -> bool:
    """Whether the module that a tensor's name gives has a weight."""
    try:
        return hasattr(model.get_submodule(name.rpartition(".")[0]), "weight")
    except AttributeError:
        return False


def _listed(names: Collection[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(sorted(names)[:_LISTED])
    return shown + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


def warn_of_missing(decoder: nn.Module, head: nn.Module | None) -> None:
    """Warn of weights that the checkpoint of a loaded model lacked, and that transformers initialised.

    No error: the caller may have set their values since. transformers marks parameters that it read, and modules that
    it was done with; models that it did not load have no such parameters, and quantised ones only some.
    """
    if getattr(getattr(decoder, "config", None), "quantization_config", None) is not None:
        return
    marked = {True: list[str](), False: list[str]()}
    for name_of_part, part in (("model", decoder), ("lm_head", head)):
        for before, module in part.named_modules(prefix=name_of_part) if part is not None else ():
            # Modules that were added later, as of adapters, have no mark.
            if not getattr(module, "_is_hf_initialized", False):
                continue
            for name, parameter in module.named_parameters(before, recurse=False):
                # Weights that accelerate has offloaded are replaced.
                if not parameter.is_meta:
                    marked[getattr(parameter, "_is_hf_initialized", False)].append(name)
    if marked[True] and marked[False]:
        warnings.warn(
            "the model's checkpoint lacked weights, which transformers initialised at random; unless they were set "
            f"since, outputs are wrong: {_listed(marked[False])}",
            stacklevel=3,
        )
