"""Compile tests of the kernels without products: the row sums, and the sums by key of the deterministic mode."""

import pytest
from support.launches import launches, main_kernels
from support.marks import mostly_full
from support.recording import Recording

from flashlatte.runtime import machine

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="compiles, which the interpreter does not")


@pytest.mark.parametrize("arch", mostly_full((80, 90, 100), 90))
def test_spill_nothing(monkeypatch, arch):
    found = launches(
        Recording(monkeypatch), "sparse_attention_backward", "portable", deterministic=True, dlse=True, arch=arch
    )
    others = [one for one in found if one not in main_kernels(found)]
    assert {one.name for one in others} == {"row_sums_kernel", "sum_by_key_kernel"}
    for one in others:
        code = one.compile(arch)
        assert code.spills == 0, code
        assert code.registers > 16, code


def test_scratch_of_deterministic_sums_is_bounded(monkeypatch):
    record = Recording(monkeypatch)
    for s_q, topk in ((1, 2048), (70, 2048), (2, 150_000)):
        found = launches(
            record, "sparse_attention_backward", "portable", s_q=s_q, heads=1, topk=topk, deterministic=True
        )
        pieces = [one.launch.arguments for one in found if one.name == "keys_kernel"]
        assert all(piece["dkv"].nbytes <= 256 << 20 for piece in pieces)
        assert len({piece["dkv"].data_ptr() for piece in pieces}) == 1
