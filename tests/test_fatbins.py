"""``.ci/fatbins.py``: removal of machine code from synthetic extensions."""

import importlib.util
import sys
from pathlib import Path

import pytest

PTX, MACHINE_CODE = 1, 2


@pytest.fixture(scope="module")
def fatbins():
    path = Path(__file__).parents[1] / ".ci" / "fatbins.py"
    spec = importlib.util.spec_from_file_location("fatbins", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fatbins"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["fatbins"]


def fat_binary(fatbins, *entries):
    """A fat binary of (kind, architecture, code) with headers of 64 bytes."""
    body = b""
    for kind, architecture, code in entries:
        header = fatbins.ENTRY.pack(kind, 0x101, 64, len(code), 0, 0, 0, architecture)
        body += header.ljust(64, b"\xff") + code
    return fatbins.HEADER.pack(0xBA55ED50, 1, 16, len(body)) + body


def test_code_of_other_gpus_becomes_zeros(fatbins):
    entries = [
        (PTX, 90, b"ptx!"),
        (MACHINE_CODE, 80, b"older"),
        (MACHINE_CODE, 90, b"hopper"),
        (MACHINE_CODE, 100, b"n"),
    ]
    first, second = fat_binary(fatbins, *entries), fat_binary(fatbins, (MACHINE_CODE, 90, b"more"))
    # The magic number also appears within other data.
    extension = b"elf" + fatbins.MAGIC + b"x" * 40 + first + b"between" + second + b"end"
    stripped, kept = fatbins.strip(extension, 90)
    assert kept == len(b"hopper") + len(b"more")
    expected = extension
    for removed in (b"ptx!", b"older"):
        expected = expected.replace(removed, bytes(len(removed)))
    at = expected.index(b"between") - 1
    assert stripped == expected[:at] + b"\0" + expected[at + 1 :]
    assert [entry.architecture for entry in fatbins.entries(stripped)] == [90, 80, 90, 100, 90]


def test_kernels_are_removed_by_name(fatbins):
    entries = [(MACHINE_CODE, 90, b"..kernel_fp16.."), (MACHINE_CODE, 90, b"..kernel_bf16..")]
    stripped, kept = fatbins.strip(fat_binary(fatbins, *entries), 90, lambda code: b"kernel_bf16" not in code)
    assert kept == len(b"..kernel_bf16..")
    assert b"bf16" in stripped
    assert b"fp16" not in stripped
