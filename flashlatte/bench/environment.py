"""The conditions of a result: the device, the versions, the commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

import flashlatte

COMMIT_VARIABLE = "FLASHLATTE_COMMIT"
PACKAGE = Path(flashlatte.__file__).resolve().parent


@dataclass(frozen=True)
class Environment:
    device: str
    torch: str
    triton: str | None
    flashlatte: str
    commit: str
    date: str


def describe(device: torch.device) -> Environment:
    return Environment(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        torch=torch.__version__,
        triton=package_version("triton"),
        flashlatte=flashlatte.__version__,
        commit=commit(),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def commit() -> str:
    """FLASHLATTE_COMMIT, or the checkout's commit, with "-dirty" if the package differs from it."""
    if COMMIT_VARIABLE in os.environ:
        return os.environ[COMMIT_VARIABLE]
    checkout = checkout_root()
    if checkout is not None and (checkout / ".git").exists():
        try:
            head = _git(checkout, "rev-parse", "--short=12", "HEAD")
            return head + ("-dirty" if _git(checkout, "status", "--porcelain", "--", PACKAGE.name) else "")
        except (OSError, subprocess.CalledProcessError):
            pass
    return "unknown"


def checkout_root() -> Path | None:
    """The folder of the source checkout that this package runs from, or None if it is installed."""
    root = PACKAGE.parent
    return root if (root / "pyproject.toml").exists() else None


def in_checkout(path: Path) -> Path:
    """Raises ValueError if this package is installed outside of a source checkout."""
    root = checkout_root()
    if root is None:
        raise ValueError(f"{path} is in the source checkout, and this FlashLatte is installed elsewhere")
    return root / path


def check_gpu() -> None:
    """Raises ValueError if PyTorch finds no CUDA GPU."""
    if not torch.cuda.is_available():
        raise ValueError("this benchmark needs a CUDA GPU, and PyTorch finds none")


def check_installed(package: str) -> None:
    """Raises ValueError if a package that the benchmark runs is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"this benchmark runs {package}, which is not installed")


def gpu_slug(device_name: str) -> str:
    """ "h100" of "NVIDIA H100 80GB HBM3", "rtx4090" of "NVIDIA GeForce RTX 4090"."""
    model = re.search(r"\b(?:(RTX|GTX)\s*)?([A-Z]{1,2}\d+[A-Z]*|(?<=X )\d{3,4})\b", device_name)
    name = "".join(part for part in model.groups() if part) if model else device_name
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _git(checkout: Path, *arguments: str) -> str:
    result = subprocess.run(["git", "-C", checkout, *arguments], capture_output=True, text=True, check=True)
    return result.stdout.strip()


def package_version(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
