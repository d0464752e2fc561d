"""Collects the kernels that a model's steps launch on a GPU, and compiles those that Triton's cache lacks."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from flashlatte.doctor.calls import DTYPES
from flashlatte.doctor.models import layer_kinds, read_fields
from flashlatte.kv_cache import FORMAT_NAMES
from flashlatte.kv_cache.registry import DEEPSEEK_V4_FORMAT
from flashlatte.kv_cache.v41 import V41Format
from flashlatte.layers import V4Config, V41Config
from flashlatte.layers.v4.config import MODEL_TYPE as V4_MODEL_TYPE
from flashlatte.layers.v4.warmup import warmup_steps as warmup_steps_v4
from flashlatte.layers.v41.config import MODEL_TYPE as V41_MODEL_TYPE
from flashlatte.layers.v41.warmup import warmup_steps as warmup_steps_v41
from flashlatte.layers.warmup import FEW_TOKENS, warmup_steps
from flashlatte.runtime import checks, machine, precompile

# SMs of the largest GPU of each compute capability, for --target without --sms.
NUM_SMS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 103: 160, 120: 188}
# The steps that are run allocate tensors of so many tokens; the shortest requests have ``FEW_TOKENS`` tokens.
_MAX = {"max_batch": 65536, "max_queries": FEW_TOKENS}
# Models have 4 residual streams. Their parameters grow with the third power of the number.
_MAX_STREAMS = 32


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code, 1 if a kernel does not compile."""
    _check_numbers(arguments)
    fields, gpu = read_fields(arguments.model), _target(arguments.target, arguments.sms)
    with precompile.assuming(gpu):
        return _run(arguments, fields, "sm_{}{}".format(*gpu.capability))


def _run(arguments: argparse.Namespace, fields: dict[str, Any], target: str) -> int:
    """``run`` for the model with these fields, while a GPU is assumed."""
    say = (lambda _: None) if arguments.json else functools.partial(print, flush=True)
    variants = _variants(arguments, fields)
    missing = [variant for variant in variants if not variant.is_compiled()]
    say(f"{len(variants)} kernels for {target}, {len(missing)} not compiled yet")
    errors: dict[str, str] = {}
    if arguments.list:
        for variant in variants:
            say(f"  {variant.name:<40}{'missing' if variant in missing else 'compiled'}")
    elif missing:
        begin = time.perf_counter()
        jobs = min(arguments.jobs or len(os.sched_getaffinity(0)), len(missing))
        for done, (name, seconds, error) in enumerate(_compile(missing, jobs), 1):
            if error is not None:
                errors[name] = error
            say(f"  {done:>3} of {len(missing)}  {name}: {error or f'{seconds:.1f} s'}")
        say(f"{len(missing) - len(errors)} compiled in {time.perf_counter() - begin:.0f} s, {jobs} at a time")
        missing = [variant for variant in missing if variant.name in errors]
    if arguments.json:
        names = {"kernels": variants, "missing": missing}
        facts = {"target": target} | {name: [one.name for one in found] for name, found in names.items()}
        print(json.dumps(facts | {"errors": errors}, indent=2))
    return 1 if errors else 0


def _check_numbers(arguments: argparse.Namespace) -> None:
    for name in ("max_batch", "max_queries", "page_size", "tensor_parallel", "sms", "jobs"):
        value = getattr(arguments, name)
        high = _MAX.get(name, math.inf)
        if value is not None and not 1 <= value <= high:
            accepted = "at least 1" if high == math.inf else f"from 1 to {high}"
            raise ValueError(f"--{name.replace('_', '-')} must be {accepted}, got {value}")


def _target(name: str | None, sms: int | None) -> machine.GPU:
    if name is None:
        if not torch.cuda.is_available():
            raise ValueError("--target must be given without a GPU, for example sm_90 for an H100")
        if torch.version.hip is not None:
            raise ValueError("kernels can be compiled ahead of time for NVIDIA GPUs only, got an AMD GPU")
        return machine.GPU(torch.cuda.get_device_capability(), machine.num_sms(torch.device("cuda")))
    match = re.fullmatch(r"sm_(\d{2,3})a?", name)
    if match is None or int(match[1]) not in NUM_SMS:
        raise ValueError(f"--target must be one of {', '.join(f'sm_{one}' for one in NUM_SMS)}, got {name!r}")
    capability = int(match[1])
    return machine.GPU(divmod(capability, 10), sms or NUM_SMS[capability])


def _variants(arguments: argparse.Namespace, fields: dict[str, Any]) -> list[precompile.Variant]:
    kinds = {V4_MODEL_TYPE: (_v4_steps, DEEPSEEK_V4_FORMAT), V41_MODEL_TYPE: (_v41_steps, V41Format.name)}
    steps_of, default_format = kinds.get(str(fields.get("model_type")), (_mla_steps, arguments.dtype))
    formats = arguments.cache_format or [default_format]
    unknown = [name for name in formats if name not in FORMAT_NAMES]
    if unknown:
        raise ValueError(f"--cache-format must be one of {', '.join(FORMAT_NAMES)}, got {unknown[0]!r}")
    steps = steps_of(fields, arguments.tensor_parallel)
    if precision := arguments.decode_precision:
        if steps_of is not _mla_steps:
            raise ValueError(f"--decode-precision belongs to dense MLA layers, got a {fields['model_type']}")
        steps = functools.partial(steps, decode_precision=precision)
    with precompile.collected() as found:
        for cache_format in formats:
            step = steps(
                cache_format=cache_format,
                dtype=DTYPES[arguments.dtype],
                page_size=arguments.page_size,
                max_batch=arguments.max_batch,
                max_queries=arguments.max_queries,
            )
            try:
                for _ in step:
                    pass
            except RuntimeError as error:
                if "allocate memory" not in str(error):
                    raise
                raise ValueError(
                    f"--model, --page-size and --max-batch must be of steps that fit this machine's memory, got "
                    f"{arguments.model}, {arguments.page_size} and {arguments.max_batch}: {str(error).splitlines()[0]}"
                ) from error
    return found


def _mla_steps(fields: dict[str, Any], ranks: int) -> Callable[..., Iterator[str]]:
    """``warmup_steps`` of a rank for each kind of layer in turn, to be called with the other options."""
    configs = [kind.config for kind in layer_kinds(fields)]
    for config in configs:
        _check_ranks("heads", config.num_attention_heads, ranks)
    # The hidden size does not change attention's kernels.
    configs = [replace(config, hidden_size=min(config.hidden_size, 1024)) for config in configs]
    return lambda **options: itertools.chain.from_iterable(
        warmup_steps(config, heads=config.num_attention_heads // ranks, **options) for config in configs
    )


def _v4_steps(fields: dict[str, Any], ranks: int) -> Callable[..., Iterator[str]]:
    layers = V4Config.layers(fields)
    _check_layer_ranks(layers[0], ranks)
    streams = checks.positive_int("hc_mult", fields.get("hc_mult", 4), maximum=_MAX_STREAMS)
    return functools.partial(warmup_steps_v4, layers, ranks=ranks, streams=streams)


def _v41_steps(fields: dict[str, Any], ranks: int) -> Callable[..., Iterator[str]]:
    layers = V41Config.layers(fields)
    _check_layer_ranks(layers[0], ranks)
    return functools.partial(warmup_steps_v41, layers, ranks=ranks)


def _check_layer_ranks(config: V4Config, ranks: int) -> None:
    _check_ranks("heads", config.num_attention_heads, ranks)
    _check_ranks("groups of heads", config.o_groups, ranks)


def _check_ranks(name: str, count: int, ranks: int) -> None:
    if count % ranks:
        raise ValueError(f"--tensor-parallel must divide the model's {count} {name}, got {ranks}")


_to_compile: list[precompile.Variant] = []


def _compile(variants: list[precompile.Variant], jobs: int) -> Iterator[tuple[str, float, str | None]]:
    """Yield name, seconds and error of each variant when it is done. Forked processes inherit the variants."""
    _to_compile[:] = variants
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap_unordered(_compile_one, range(len(variants)))


def _compile_one(index: int) -> tuple[str, float, str | None]:
    variant, begin = _to_compile[index], time.perf_counter()
    try:
        variant.compile()
    except Exception as error:  # an error in Triton or ptxas must not stop the other variants
        return variant.name, time.perf_counter() - begin, f"{type(error).__name__}: {error}"
    return variant.name, time.perf_counter() - begin, None
