"""``flashlatte bench``: operations on named cases, and named benchmarks of more than one call."""

from __future__ import annotations

import argparse
import importlib
import sys

EXTRA_HINT = "pip install 'flashlatte[bench]'"

# Name, module of this package and summary of each benchmark with its own command line. A module has
# ``add_arguments(parser)`` and ``run(options)``, which returns the exit code.
NAMED = {
    "compare": ("compare", "two checkouts, timed alternately"),
    "peers": ("peers.command", "FlashMLA, FlashAttention-3 and PyTorch, alternately; cost growth of dense decode"),
    "flashmla": ("peers.flashmla", "FlashMLA's own package, alternately with FlashLatte, a line for each case"),
    "shared-gpu": ("shared.command", "several processes call kernels on one GPU and compare each result"),
    "host-time": ("host_time", "host time of warm calls"),
    "compile-time": ("compile_time", "compile time of each kernel, without a GPU"),
    "mla-layer": ("layers.mla", "a decode step of DeepSeek-V3's layer"),
    "dsa-layer": ("layers.dsa", "DeepSeek-V3.2's layer with its indexer: decode steps and prefill"),
    "v4-layer": ("layers.v4", "a decode step of DeepSeek-V4's layers"),
    "distributed-decode": ("distributed.decode", "decode with keys divided over several GPUs (torchrun)"),
    "distributed-prefill": ("distributed.prefill", "prefill of a long prompt on several GPUs (torchrun)"),
    "distributed-layer": ("distributed.layer", "a decode step of a layer on several GPUs (torchrun)"),
    "engine": ("serving.engine", "the engine compared with transformers"),
    "vllm-steps": ("serving.vllm_steps", "decode steps of vLLM with several attention backends, alternately"),
    "sglang-steps": ("serving.sglang_steps", "decode steps of SGLang without FlashLatte and with it, alternately"),
    "vllm-throughput": ("serving.vllm_throughput", "vLLM's throughput without FlashLatte and with it, alternately"),
    "cache-quantization": ("cache_quantization", "error of attention over quantized caches, on a CPU"),
    "plot": ("pictures.command", "draw results as the pictures of the documentation"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``flashlatte bench`` to a parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    width = max(map(len, NAMED))
    parser.epilog = "benchmarks (flashlatte bench NAME --help):\n" + "\n".join(
        f"  {name:{width}}  {summary}" for name, (_, summary) in NAMED.items()
    )
    parser.add_argument(
        "name", nargs="?", choices=NAMED, metavar="NAME", help="a benchmark listed below; default: the list of cases"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    parser.add_argument("--op", action="append", metavar="NAME", help="only this operation (may be repeated)")
    parser.add_argument(
        "--case", action="append", metavar="NAME", help="only this case; * and ? match any letters (may be repeated)"
    )
    parser.add_argument(
        "--backend",
        action="append",
        metavar="NAME",
        help="hopper, portable or reference (may be repeated); default: all that have kernels for the GPU",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="append a JSON line for each result to FILE, or print them for -"
    )
    parser.add_argument(
        "--record", action="store_true", help="append correct results to benchmarks/results/<gpu>.jsonl (a checkout)"
    )
    parser.add_argument("--list", action="store_true", help="print the cases and FlashMLA's recorded times")
    parser.add_argument(
        "--plot", action="store_true", help="draw benchmarks/results/*.jsonl into docs/; without --record runs nothing"
    )


def main(args: argparse.Namespace) -> int:
    """Run ``flashlatte bench``.

    Returns:
        0; 1 if a result was wrong or a case failed; 2 if the request cannot be met (an unknown name, a missing extra).
    """
    if args.name is not None:
        return run_named(args.name, args.arguments)
    from flashlatte.bench import command

    try:
        return command.run(args)
    except ValueError as refusal:
        print(f"flashlatte bench: {refusal}", file=sys.stderr)
        return 2


def run_named(name: str, arguments: list[str]) -> int:
    """Run one of ``NAMED``. A module with ``FORWARDS`` receives the arguments after ``--`` as ``options.forwarded``.

    Raises:
        SystemExit: with 2, if the arguments are wrong.
    """
    module = importlib.import_module(f"flashlatte.bench.{NAMED[name][0]}")
    parser = argparse.ArgumentParser(
        prog=f"flashlatte bench {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    end = arguments.index("--") if "--" in arguments and getattr(module, "FORWARDS", False) else len(arguments)
    options = parser.parse_args(arguments[:end], argparse.Namespace(forwarded=arguments[end + 1 :]))
    try:
        return module.run(options)
    except ValueError as error:
        parser.error(str(error))
