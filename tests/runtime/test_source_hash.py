"""A kernel's key in Triton's cache is the same whatever kernels the process launched before."""

import importlib.util
import itertools
import sys

import pytest
import triton

from flashlatte.runtime import machine
from flashlatte.runtime.source_hash import hash_source

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="the interpreter has no cache")

MODULE = """
import triton
import triton.language as tl

SCALE = tl.constexpr({scale})
OFFSET = tl.constexpr(7)

@triton.jit
def scaled(x):
    return x * SCALE

@triton.jit
def moved(x):
    return scaled(x) + OFFSET

@triton.jit
def first(x):
    tl.store(x, moved(tl.load(x)))

@triton.jit
def second(x):
    tl.store(x, scaled(tl.load(x)) + tl.sum(tl.arange(0, 4), axis=0))

@triton.jit
def third(x):
    second(x)
    first(x)
"""
KERNELS = ("first", "second", "third")


@pytest.fixture(autouse=True)
def no_bytecode(monkeypatch):
    """Python would take the bytecode of a file that is replaced within a second by one of the same size."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def hashes(path, order, scale=2):
    """The keys of the kernels of a new module, hashed in this order."""
    path.write_text(MODULE.format(scale=scale))
    spec = importlib.util.spec_from_file_location("kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in order:
        hash_source(getattr(module, name))
    return {name: getattr(module, name).cache_key for name in KERNELS}


def test_keys_do_not_depend_on_the_order(tmp_path):
    found = [hashes(tmp_path / "kernels.py", order) for order in itertools.permutations(KERNELS)]
    assert all(each == found[0] for each in found)
    assert len(set(found[0].values())) == 3


def test_constants_of_called_functions_change_the_keys(tmp_path):
    path = tmp_path / "kernels.py"
    before, after = (hashes(path, KERNELS, scale) for scale in (2, 3))
    assert all(before[name] != after[name] for name in KERNELS)


def test_triton_hashes_as_before_afterwards(tmp_path):
    update = triton.runtime.jit.DependenciesFinder._update_hash
    hashes(tmp_path / "kernels.py", KERNELS)
    assert triton.runtime.jit.DependenciesFinder._update_hash is update
