"""Download wheels for another Python version and platform than this machine's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# Minor versions of glibc, newest first.
GLIBCS = (39, 35, 34, 31, 28, 27, 24, 17)
# Exit code of a command whose wheels cannot be downloaded here.
CANNOT = 3


def download(requirements: Sequence[str], folder: Path, python: str) -> list[Path]:
    """The wheels of ``requirements`` for Linux and a version of Python ("3.12"), without their dependencies.

    Raises:
        subprocess.CalledProcessError: a wheel cannot be downloaded here.
    """
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBCS] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    abis = (f"cp{python.replace('.', '')}", "cp310", "abi3", "none")
    options = ["--no-deps", "--only-binary", ":all:", "--implementation", "cp", "--python-version", python]
    options += [word for platform in platforms for word in ("--platform", platform)]
    options += [word for abi in abis for word in ("--abi", abi)]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", *options]
    subprocess.run([*pip, "--dest", str(folder), *requirements], check=True)
    return sorted(folder.glob("*.whl"))
