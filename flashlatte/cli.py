"""The command line. Nothing here imports torch before a command runs."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import warnings
from pathlib import Path

import flashlatte

USER_ERROR = 2


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns its exit code: 0 for success, 1 if the command reports an error, 2 for invalid
    arguments."""
    arguments = argparse.Namespace(command="")
    try:
        arguments = _parser().parse_args(argv)
        with warnings.catch_warnings():
            # torch warns if NumPy is missing; only bench --plot needs it.
            warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
            return arguments.run(arguments)
    except BrokenPipeError:
        # The reader (such as head) has closed the pipe. Python would raise again when it flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        print(f"flashlatte {arguments.command}: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    from flashlatte import bench, precompile, serve
    from flashlatte.engine.arguments import add_model_arguments

    parser = argparse.ArgumentParser(prog="flashlatte", description="Multi-head Latent Attention in Python.")
    parser.add_argument("--version", action="version", version=f"flashlatte {flashlatte.__version__}")
    names = "demo | generate | serve | doctor | compile | bench"
    commands = parser.add_subparsers(dest="command", required=True, metavar=names)

    demo = commands.add_parser(
        "demo", help="compare a small DeepSeek model in transformers with and without FlashLatte"
    )
    demo.add_argument("--model", default="v3", help="v3 (default), v3.2 (with an indexer) or v4")
    begin = demo.add_mutually_exclusive_group()
    begin.add_argument("--prompt", help="text to continue; default: one that the package contains")
    begin.add_argument("--file", type=Path, help="file with the text")
    demo.add_argument(
        "--new-tokens", type=int, default=64, help="number of tokens to generate, 64 to 1024 (default 64)"
    )
    demo.add_argument("--device", help="cuda or cpu; default: a GPU if there is one")
    demo.set_defaults(run=_demo)

    generate = commands.add_parser(
        "generate", help="generate text from a checkpoint; run with torchrun for several GPUs"
    )
    add_model_arguments(generate)
    text = generate.add_mutually_exclusive_group()
    text.add_argument("--prompt", help="text to continue; default: standard input")
    text.add_argument("--file", type=Path, help="file with the text; - reads standard input")
    generate.add_argument(
        "--chat",
        action="store_true",
        help="answer the text by the tokenizer's chat template; without a text, each line of standard input",
    )
    generate.add_argument("--max-tokens", type=int, default=128, help="maximum number of new tokens (default 128)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 (default) takes the most likely token")
    generate.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the most likely tokens with this cumulative probability (default 1)",
    )
    generate.add_argument("--seed", type=int, default=0, help="seed of the sampling (default 0)")
    generate.add_argument(
        "--stop", action="append", metavar="TEXT", help="end the output before this text (may be repeated)"
    )
    generate.set_defaults(run=_generate)

    serve_parser = commands.add_parser("serve", help="serve a checkpoint by OpenAI's HTTP API")
    serve.add_arguments(serve_parser)
    serve_parser.set_defaults(run=serve.main)

    doctor = commands.add_parser("doctor", help="print this machine, and the implementation chosen for each operation")
    doctor.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="dtype of the queries")
    doctor.add_argument(
        "--model", type=Path, metavar="CONFIG.json", help="report for this model: its config.json or its directory"
    )
    doctor.add_argument("--all", action="store_true", help="list every implementation that cannot run, with the reason")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument(
        "--report",
        nargs="?",
        const=Path("-"),
        type=Path,
        metavar="FILE",
        help="check and time the kernels of sparse MLA, and write JSON to FILE, or to standard output without FILE",
    )
    doctor.set_defaults(run=_doctor)

    compile_parser = commands.add_parser("compile", help="compile the kernels that a model needs ahead of time")
    precompile.add_arguments(compile_parser)
    compile_parser.set_defaults(run=precompile.main)

    bench_parser = commands.add_parser("bench", help="check and time operations on named cases")
    bench.add_arguments(bench_parser)
    bench_parser.set_defaults(run=bench.main)
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    from flashlatte.demo import run_demo

    return run_demo(arguments.file, arguments.new_tokens, arguments.device, arguments.model, prompt=arguments.prompt)


def _generate(arguments: argparse.Namespace) -> int:
    from flashlatte.engine.command import generate

    return generate(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    from flashlatte import doctor

    if arguments.report is not None:
        return _doctor_report(arguments)
    facts = doctor.diagnose(arguments.dtype, arguments.model)
    print(json.dumps(facts, indent=2) if arguments.json else doctor.report(facts, every_reason=arguments.all))
    return 0


def _doctor_report(arguments: argparse.Namespace) -> int:
    from flashlatte.doctor import hardware

    if arguments.model is not None or arguments.all or arguments.json or arguments.dtype != "bf16":
        raise ValueError("--report takes no other option")
    file = None if arguments.report == Path("-") else arguments.report
    if file is not None:
        try:
            file.write_text("")  # before the cases run, which takes minutes
        except OSError as error:
            raise ValueError(f"--report must be a file that can be written, got {file}: {error.strerror}") from None
    report = hardware.collect(functools.partial(print, file=sys.stderr, flush=True))
    text = json.dumps(report, indent=1, ensure_ascii=False)
    if file is None:
        print(text)
    else:
        file.write_text(text + "\n", encoding="utf-8")
        print(f"{hardware.summary(report)}; written to {file}", file=sys.stderr)
    return int(set(report["counts"]) != {"ok"})


if __name__ == "__main__":
    sys.exit(main())
