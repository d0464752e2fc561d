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
)
# The wheels' Python version and platform, not this machine's: the sources are read, not run.
PLATFORM = (
    "manylinux_2_35_x86_64",
    "manylinux_2_34_x86_64",
    "manylinux_2_31_x86_64",
    "manylinux_2_28_x86_64",
    "manylinux2014_x86_64",
)
PYTHON, ABIS = "3.11", ("cp311", "abi3", "none")
CANNOT = 3


def fetch(name: str, version: str, folder: Path) -> bool:
    """Whether FOLDER/NAME-VERSION has the sources."""
    target = folder / f"{name}-{version}"
    if target.exists():
        return True
    options = ["--no-deps", "--only-binary", ":all:", "--implementation", "cp", "--python-version", PYTHON]
    options += [word for platform in PLATFORM for word in ("--platform", platform)]
    options += [word for abi in ABIS for word in ("--abi", abi)]
    with tempfile.TemporaryDirectory() as downloads:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
        command = [*pip, *options, "--dest", downloads, f"{name}=={version}"]
        if subprocess.run(command, stderr=subprocess.DEVNULL).returncode:
            print(f"{name} {version} cannot be downloaded here", file=sys.stderr)
            return False
        (wheel,) = Path(downloads).glob("*.whl")
        unpacked = Path(downloads) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked, [member for member in archive.namelist() if member.endswith(".py")])
        # A copy, as the two folders may be on different file systems.
        shutil.copytree(unpacked, target)
    return True


def main(folder: Path) -> int:
    fetched = [fetch(name, version, folder) for name, version in PEERS]
    return 0 if all(fetched) else CANNOT


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
