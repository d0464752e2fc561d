"""Fetch the Python sources of the projects whose functions FlashLatte replaces, to compare signatures.

    python .ci/peers.py FOLDER

Wheels are downloaded by pip, their Python files are put into FOLDER/NAME-VERSION, and the wheels are deleted. Exit code
3: some cannot be downloaded here.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import wheel_downloads

PEERS = (
    ("vllm", "0.33.0"),
    ("vllm", "0.20.2"),
    ("sglang", "0.5.23"),
    # The version of .ci/sglang_archive.py, in which flashlatte bench sglang-steps runs.
    ("sglang", "0.5.17"),
    ("sgl-flash-mla", "1.0.0"),
    ("sgl-deep-gemm", "0.2.5"),
    # Which SGLang 0.5.23 pins.
    ("sgl-deep-gemm", "0.2.3.post2"),
    ("flashinfer-python", "0.6.15.post1"),
    ("flashinfer-python", "0.7.4"),
)
# Python of the wheels, not of this machine: the sources are read, not run.
PYTHON = "3.11"


def fetch(name: str, version: str, folder: Path) -> bool:
    """Whether FOLDER/NAME-VERSION has the sources."""
    target = folder / f"{name}-{version}"
    if target.exists():
        return True
    with tempfile.TemporaryDirectory() as downloads:
        try:
            (wheel,) = wheel_downloads.download([f"{name}=={version}"], Path(downloads), PYTHON)
        except subprocess.CalledProcessError:
            print(f"{name} {version} cannot be downloaded here", file=sys.stderr)
            return False
        unpacked = Path(downloads) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked, [member for member in archive.namelist() if member.endswith(".py")])
        # A copy, as the two folders may be on different file systems.
        shutil.copytree(unpacked, target)
    return True


def main(folder: Path) -> int:
    fetched = [fetch(name, version, folder) for name, version in PEERS]
    return 0 if all(fetched) else wheel_downloads.CANNOT


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
