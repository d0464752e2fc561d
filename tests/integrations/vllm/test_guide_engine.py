"""The guide's commands, as vLLM reads them."""

import shlex
from pathlib import Path

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guide" / "vllm.md"
COMMAND = "vllm bench throughput "


def test_what_is_measured_is_what_the_guide_says():
    from vllm.benchmarks.throughput import add_cli_args, validate_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    backends = []
    for line in GUIDE.read_text().splitlines():
        if line.startswith(COMMAND):
            arguments = parser.parse_args(shlex.split(line.removeprefix(COMMAND)))
            validate_args(arguments)
            assert arguments.dataset_name == "random"
            assert (arguments.random_input_len, arguments.random_output_len) == (4096, 256)
            # Where both are given, vLLM takes the other.
            assert (arguments.input_len, arguments.output_len) == (None, None)
            backends.append(arguments.attention_backend)
    assert [str(backend) for backend in backends] == ["CUSTOM", "None"]
