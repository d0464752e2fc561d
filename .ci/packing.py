"""Packing a serving engine for a Hopper GPU machine that has PyTorch and Triton, and no network."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import fatbins
import tomllib
import wheel_downloads

ROOT = Path(__file__).resolve().parents[1]
# Python of the GPU machine.
PYTHON = "3.12"
ARCHITECTURE = 90
MIB = 1 << 20
# Packages that SGLang and vLLM import and PyTorch's usual image lacks.
SHARED_PACKAGES = (
    "annotated-types==0.8.0",
    "fastapi==0.165.0",
    "llguidance==1.9.1",
    "loguru==0.7.3",
    "msgspec==0.22.0",
    "opentelemetry-api==1.45.2",
    "opentelemetry-sdk==1.45.2",
    "opentelemetry-semantic-conventions==0.66b2",
    "partial-json-parser==0.2.1.1.post7",
    "pybase64==1.5.1",
    "pydantic==2.14.4",
    "pydantic-core==2.50.5",
    "pyzmq==27.3.0",
    "sniffio==1.3.1",
    "starlette==1.10.0",
    "typing-inspection==0.4.5",
)


def pack(
    file: Path,
    packages: Sequence[str],
    wanted: Callable[[str], bool],
    extensions: Mapping[str, fatbins.Unwanted | None],
    stand_ins: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Write an archive of the packages with machine code for sm_90 only, and FlashLatte's entry points.

    Args:
        packages: requirements, each with its version.
        wanted: whether a file of a wheel is packed, by its name in the wheel.
        extensions: compiled extensions, each with a test for machine code that is left out.
        stand_ins: contents of additional Python files, by path.

    Returns:
        an exit code: 3 if a wheel cannot be downloaded here.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "packages"
        try:
            found = wheel_downloads.download(packages, Path(folder) / "wheels", PYTHON)
        except subprocess.CalledProcessError:
            print("a wheel cannot be downloaded here", file=sys.stderr)
            return wheel_downloads.CANNOT
        for wheel in found:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target, [name for name in archive.namelist() if wanted(name)])
            wheel.unlink()
        for name, unwanted in extensions.items():
            _strip(target / name, name, unwanted)
        for name, text in stand_ins.items():
            (target / name).parent.mkdir(exist_ok=True)
            (target / name).write_text(text, encoding="utf-8")
        _register_plugin(target)
        with tarfile.open(file, "w:xz") as archive:
            archive.add(target, ".")
    print(f"{file}: {file.stat().st_size / MIB:.1f} MiB")
    return 0


def _strip(file: Path, name: str, unwanted: fatbins.Unwanted | None) -> None:
    stripped, kept = fatbins.strip(file.read_bytes(), ARCHITECTURE, unwanted)
    file.write_bytes(stripped)
    print(f"{name}: {len(stripped) / MIB:.1f} MiB, of which {kept / MIB:.1f} are machine code for sm_{ARCHITECTURE}")


def _register_plugin(target: Path) -> None:
    """Write FlashLatte's package metadata, in which engines find the plugin; the package itself is in the checkout."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = target / "flashlatte.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: flashlatte\nVersion: 0+checkout\n")
    groups = project["entry-points"].items()
    lines = [line for group, points in groups for line in (f"[{group}]", *(f"{k} = {v}" for k, v in points.items()))]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
