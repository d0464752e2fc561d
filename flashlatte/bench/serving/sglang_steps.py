"""Decode steps and prefills in SGLang with its own attention and with FlashLatte's, timed alternately on one GPU.

    flashlatte bench sglang-steps v3 v32 --json benchmarks/results/sglang.jsonl

A model is v3 or v32, layers of DeepSeek-V3's or V3.2's sizes, the dense ones, or a directory with a config.json, which
needs --backends. Weights are random. Each backend has SGLang's model runner in its own process
(sglang.benchmark.one_batch), without a server. For each case, requests x tokens of context, the runners find the same
random keys in their caches. Then they alternate, A B C, C B A, and so on, with --steps decode steps each. Prompts of
--prefill are computed in chunks of --chunk tokens.

Backends, with FlashLatte's plugin if "+flashlatte" follows the name:

    default          what SGLang takes without an option: for v3 on Hopper fa3; for v32 flashmla_sparse for prefill
                     and fa3 for decode
    fa3              FlashAttention-3, without an indexer
    flashmla         FlashMLA for decode and fa3 for prefill, without an indexer
    flashmla_sparse  FlashMLA over a bf16 cache, with an indexer
    flashmla_kv      FlashMLA over the fp8 cache of 656 bytes, with an indexer

Prints the median step with SGLang's preparation of the batch and sampling, the GPU time in it, and of that the time of
attention kernels and of the indexer's. The first tokens of the requests and their log-probabilities are compared: with
the plugin to the same backend without it, others to the first backend. JSON lines have this "agreement" with each other
backend. A backend with the plugin is reported as wrong and not recorded if a log-probability differs by more than
--tolerance up to the first different token, or if no kernel of FlashLatte ran in its decode steps; a backend without
it, if one did.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from pathlib import Path
from typing import Any

from flashlatte.bench.environment import check_installed
from flashlatte.bench.serving.engine_process import EngineProcess
from flashlatte.bench.serving.random_model import folder_of
from flashlatte.bench.serving.step_cases import StepCase, add_case_arguments, parsed
from flashlatte.bench.serving.step_times import BackendTimes, Host, compare

ENGINE = "flashlatte.bench.serving.sglang_engine"
PLUGIN = "+flashlatte"
# Arguments of SGLang's ServerArgs.
BACKENDS: dict[str, dict[str, Any]] = {
    "default": {},
    "fa3": {"attention_backend": "fa3"},
    # The prefill of SGLang's "flashmla" is FlashInfer's, which compiles its kernels at run time.
    "flashmla": {"prefill_attention_backend": "fa3", "decode_attention_backend": "flashmla"},
    "flashmla_sparse": {
        "kv_cache_dtype": "bfloat16",
        "dsa_prefill_backend": "flashmla_sparse",
        "dsa_decode_backend": "flashmla_sparse",
    },
    "flashmla_kv": {
        "kv_cache_dtype": "fp8_e4m3",
        "dsa_prefill_backend": "flashmla_kv",
        "dsa_decode_backend": "flashmla_kv",
    },
}
COMPARED = {
    "v3": "default,flashmla,flashmla+flashlatte",
    "v32": "default,default+flashlatte,flashmla_kv,flashmla_kv+flashlatte",
}
# Decode kernels of FlashLatte, by their whole names.
OWN_KERNEL = re.compile(r"^(dense|sparse)_decode_kernel")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="v3, v32 or a directory with a config.json")
    add("--backends", help=f"separated by commas; default for v3 {COMPARED['v3']}, for v32 {COMPARED['v32']}")
    add("--chunk", type=int, default=2048, help="tokens of a prefill chunk (default 2048)")
    add("--options", default="{}", help="further arguments of SGLang's ServerArgs, as JSON")
    add("--memory", type=float, default=0.8, help="mem_fraction_static of each runner (default 0.8)")
    add(
        "--tolerance",
        type=float,
        default=0.15,
        help="largest difference of a log-probability between a backend with the plugin and without (default 0.15)",
    )
    add_case_arguments(parser, cases="1x4096,32x4096,128x4096,1x32768,32x32768,128x32768", prefill="8192")


def run(options: argparse.Namespace) -> int:
    """Raises ValueError for an unknown model, backend or case, or without SGLang, before anything starts."""
    chosen = {model: backends_of(model, options.backends) for model in options.models}
    if any(context < 2 for _, context in parsed(options.cases)):
        raise ValueError(f"--cases must have contexts of 2 tokens or more, got {options.cases!r}")
    check_installed("sglang")
    return max([run_model(model, backends, options) for model, backends in chosen.items()])


def backends_of(model: str, given: str | None) -> list[str]:
    if model not in COMPARED and not (Path(model) / "config.json").exists():
        raise ValueError(f"model must be v3, v32 or a directory with a config.json, got {model!r}")
    if given is None and model not in COMPARED:
        raise ValueError(f"--backends is needed for the model {model!r}")
    backends = (given or COMPARED[model]).split(",")
    for backend in backends:
        if backend.removesuffix(PLUGIN) not in BACKENDS:
            accepted = ", ".join(BACKENDS)
            raise ValueError(f"--backends must be of {accepted}, each also with {PLUGIN}, got {backend!r}")
        if (stock := reference(backend)) is not None and stock not in backends:
            raise ValueError(f"--backends needs {stock}, whose tokens {backend} must have, got {given!r}")
    return backends


def run_model(model: str, backends: list[str], options: argparse.Namespace) -> int:
    settings = {name: value for name, value in vars(options).items() if name not in ("json", "forwarded", "models")}
    with contextlib.ExitStack() as stack:
        settings["model"] = stack.enter_context(folder_of(model, options.layers))
        engines = []
        for backend in backends:
            server = BACKENDS[backend.removesuffix(PLUGIN)]
            # SGLang loads the listed plugins only; the list must not be empty.
            variables = {"SGLANG_PLUGINS": "flashlatte" if backend.endswith(PLUGIN) else "none"}
            engine = EngineProcess(backend, ENGINE, settings | {"server": server}, variables)
            stack.callback(engine.end)
            engines.append(engine)
        facts = {"model": Path(model).name, "layers": options.layers}
        host = Host("sglang_step", facts, reference, kernels_fault, options.tolerance)
        return compare(backends, engines, host, options)


def reference(backend: str) -> str | None:
    return backend.removesuffix(PLUGIN) if backend.endswith(PLUGIN) else None


def kernels_fault(case: StepCase, row: BackendTimes) -> str | None:
    """Whether FlashLatte's decode ran in a backend without the plugin, or did not run in one with it."""
    has_own = any(OWN_KERNEL.search(name) for name in row.kernels)
    if case.is_decode and has_own != row.engine.backend.endswith(PLUGIN):
        return "FlashLatte's kernels ran" if has_own else "no kernel of FlashLatte ran"
    return None
