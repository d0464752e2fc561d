"""Decode steps and prefills of vLLM's engine with different attention backends, timed alternately on one GPU.

    flashlatte bench vllm-steps MODEL --backends CUSTOM,FLASHMLA,FLASH_ATTN_MLA --cases 1x4096,128x4096 --prefill 8192

MODEL is a directory with a config.json, or v3, v32 or v4: layers of DeepSeek-V3's or V3.2's sizes, the dense ones, or
of DeepSeek-V4-Flash's with 8 experts. Weights are random numbers unless --load-format says otherwise. Each backend has
an engine in its own process, with an equal share of the GPU's memory. For each case, requests x tokens of context,
every engine prefills its requests, or with --random-contexts finds random keys in its cache. Then they alternate,
A B C, C B A, and so on, with --steps decode steps each. CUSTOM+fp8 is FlashLatte with FLASHLATTE_DECODE_PRECISION=fp8,
which needs --kv-cache-dtype fp8.

vLLM's own indexer of v32 and v4 takes its logits from DeepGEMM. Where DeepGEMM is not installed, FlashLatte computes
them in all backends, and a line says so. Then vLLM's backends differ from CUSTOM in the top-k, the metadata and
attention. In v4, vLLM computes hyper-connections with TileLang and compresses keys with CUTLASS's Python package. Where
these are missing, all backends have FlashLatte's hyper-connections and vLLM's Triton kernel for other GPUs, and the
results have "stand_ins".

Prints the median step of the engine, scheduler and sampling included, the GPU time in it, and of that the time of
attention kernels and of the indexer's. The first tokens of the requests and their log-probabilities are compared with
the first backend's: how many requests have the same tokens, and the largest difference of a log-probability before a
token differs. JSON lines have this "agreement" with each other backend.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterable
from pathlib import Path

from flashlatte.bench.environment import check_installed
from flashlatte.bench.serving.engine_process import EngineProcess
from flashlatte.bench.serving.random_model import folder_of
from flashlatte.bench.serving.step_cases import add_case_arguments
from flashlatte.bench.serving.step_times import Host, compare

ENGINE = "flashlatte.bench.serving.vllm_engine"
# After a backend's name: FlashLatte's variable for products in e4m3.
FP8 = "+fp8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="a directory with a config.json, v3, v32 or v4")
    add(
        "--backends", default="CUSTOM,FLASHMLA,FLASH_ATTN_MLA", help="vLLM's names of the backends, separated by commas"
    )
    add("--random-contexts", action="store_true", help="do not prefill contexts: caches have random keys")
    add("--dtype", default="bfloat16")
    add("--kv-cache-dtype", default="auto")
    add(
        "--load-format",
        default="random",
        help="vLLM's --load-format (default random: weights that keep activations in scale)",
    )
    add("--options", default="{}", help="further arguments of vllm.LLM, as JSON")
    add("--memory", type=float, default=0.9, help="share of the GPU for all engines (default 0.9)")
    add_case_arguments(parser, cases="1x4096,32x4096,128x4096", prefill="")


def run(options: argparse.Namespace) -> int:
    check_installed("vllm")
    settings = {name: value for name, value in vars(options).items() if name not in ("json", "forwarded")}
    backends = options.backends.split(",")
    settings["memory"] = options.memory / len(backends)
    facts = {"dtype": options.dtype, "cache": options.kv_cache_dtype, "model": Path(options.model).name}
    with contextlib.ExitStack() as stack:
        settings["model"] = stack.enter_context(folder_of(options.model, options.layers))

        def started(backend: str) -> EngineProcess:
            precision = "fp8" if backend.endswith(FP8) else ""
            variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "FLASHLATTE_DECODE_PRECISION": precision}
            server = settings | {"backend": backend.removesuffix(FP8)}
            engine = EngineProcess(backend, ENGINE, server, variables)
            stack.callback(engine.end)
            return engine

        engines: Iterable[EngineProcess] = map(started, backends)
        if "kv_cache_memory_bytes" in json.loads(options.options):
            engines = list(engines)  # all together; otherwise one after the other, as each measures the free memory
        return compare(backends, engines, Host("vllm_step", facts), options)
