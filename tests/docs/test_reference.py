"""The reference documents every public name."""

import importlib
import re
from pathlib import Path

import pytest

import flashlatte

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
PACKAGES = (
    "flashlatte",
    "flashlatte.kv_cache",
    "flashlatte.flash_mla",
    "flashlatte.flashinfer",
    "flashlatte.deep_gemm",
    "flashlatte.layers",
    "flashlatte.distributed",
)
EXTRA = (
    "flashlatte.integrations.transformers",
    "flashlatte.integrations.vllm",
    "flashlatte.integrations.vllm.ops",
    "flashlatte.integrations.sglang",
)


def documented():
    """The objects named by the pages' ``:::`` lines, by identity."""
    found = set()
    for page in REFERENCE.glob("*.md"):
        for path in re.findall(r"^::: ([\w.]+)", page.read_text(), re.MULTILINE):
            module, _, name = path.rpartition(".")
            try:
                found.add(id(importlib.import_module(path)))
            except ModuleNotFoundError:
                found.add(id(getattr(importlib.import_module(module), name)))
    return found


@pytest.mark.parametrize("package", [*PACKAGES, *EXTRA])
def test_every_public_name_is_documented(package):
    known, module = documented(), importlib.import_module(package)
    values = {name: getattr(module, name) for name in dir(module) if name in getattr(module, "__all__", dir(module))}
    described = {name for name, value in values.items() if callable(value)}
    assert described, package
    assert [name for name in sorted(described) if id(values[name]) not in known] == []


def test_packages_are_those_of_the_library():
    packages = {f"flashlatte.{name}" for name in dir(flashlatte) if not callable(getattr(flashlatte, name))}
    assert packages - {"flashlatte.__version__"} - {"flashlatte.integrations"} <= {*PACKAGES, "flashlatte.runtime"}
