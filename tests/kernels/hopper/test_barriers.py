"""The check for unused mbarriers, which runs on every compiled kernel."""

from __future__ import annotations

from support.compile import unused_mbarriers

_TTGIR = """
    %used = ttg.local_alloc : () -> !ttg.memdesc<1xi64, #shared, #smem, mutable> loc(#loc1)
    ttng.init_barrier %used, 1 : !ttg.memdesc<1xi64, #shared, #smem, mutable> loc(#loc2)
    %ring = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared, #smem, mutable> loc(#loc3)
    %first = ttg.memdesc_index %ring[%c0_i32] : !ttg.memdesc<2x1xi64, #shared, #smem, mutable> loc(#loc4)
    ttng.init_barrier %first, 1 : !ttg.memdesc<1xi64, #shared, #smem, mutable> loc(#loc5)
    ttg.warp_specialize(%used{others}) attributes {{requestedRegisters = array<i32: 192>}}
"""


def test_mbarriers_that_are_only_initialized_are_found():
    assert unused_mbarriers(_TTGIR.format(others="")) == {"%ring"}
    assert unused_mbarriers(_TTGIR.format(others=", %ring")) == set()
