"""The emulator of Hopper detects each documented fault, in kernels of a few instructions."""

import numpy as np
import pytest
import torch
from support.emulator.global_memory import GlobalMemory
from support.emulator.machine import Fault, Machine
from support.emulator.program import parse
from support.emulator.tensor_cores import _add_e4m3

KERNEL = """
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0
)
.reqntid {threads}
{{
    .reg .pred %p<9>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    ld.param.b64 %rd0, [kernel_param_0];
    mov.u32 %r0, %tid.x;
    setp.eq.b32 %p0, %r0, 0;
    setp.lt.u32 %p1, %r0, 32;
    mul.lo.u32 %r1, %r0, 4;
    mad.wide.u32 %rd1, %r0, 4, %rd0;
    {body}
    ret;
}}
"""


def run(body: str, threads: int = 64, size: int = 64, seed: int = 0) -> list[int]:
    """Run a kernel of one CTA. Its registers: %rd0 is a tensor of ``size`` int32, %rd1 the element of a thread, %r1 the
    address of a word of shared memory for each thread, %p0 is true in thread 0 and %p1 in warp 0."""
    tensor = torch.arange(size, dtype=torch.int32)
    memory = GlobalMemory()
    memory.add(tensor.data_ptr(), tensor.nbytes)
    machine = Machine(
        parse(KERNEL.format(threads=threads, body=body)), memory, 1024, seed=seed, late=True, finds_races=True
    )
    machine.parameters = {0: memory.address(tensor.data_ptr()).to_bytes(8, "little")}
    with np.errstate(all="ignore"):
        machine.run((1, 1, 1))
    memory.copy_back()
    return tensor.tolist()


def test_sums_of_e4m3_products_keep_14_bits():
    """Of the largest of the products and the sum so far, each truncated toward 0."""
    sums = np.array([8192, 8191.5, -16384, 0, 1, np.inf], np.float32)
    products = np.array([[1.75, -0.75], [0.25, 0.25], [-3.5, 3.5], [3e-4, -1e-9], [np.nan, 1], [1, 1]], np.float32)
    result = _add_e4m3(sums, products)
    np.testing.assert_array_equal(result[[0, 1, 2, 4, 5]], np.array([8193, 8191.5, -16384, np.nan, np.inf]))
    np.testing.assert_allclose(result[3], 3e-4, rtol=2.0**-13)


REVERSE = (
    "st.shared.b32 [%r1], %r0; {barrier} sub.s32 %r2, 252, %r1; ld.shared.b32 %r3, [%r2]; st.global.b32 [%rd1], %r3;"
)


@pytest.mark.parametrize("seed", range(5))
def test_threads_exchange_words_across_a_barrier(seed):
    assert run(REVERSE.format(barrier="bar.sync 0;"), seed=seed) == list(range(63, -1, -1))


@pytest.mark.parametrize("seed", range(5))
def test_a_missing_barrier(seed):
    with pytest.raises(Fault, match=r"has written, with no barrier between(.|\n)*ld\.shared"):
        run(REVERSE.format(barrier=""), seed=seed)


def test_a_barrier_of_too_many_threads_and_of_too_few():
    with pytest.raises(Fault, match=r"all warps wait(.|\n)*for barrier 1"):
        run("bar.sync 1, 96;")
    with pytest.raises(Fault, match=r"\d\d threads arrive at barrier 1, which expects 32"):
        run("bar.arrive 1, 96; bar.arrive 1, 32;")


@pytest.mark.parametrize(
    ("address", "message"),
    [("%rd1 + 4", "outside of the tensors: at byte 256 of a tensor of 256"), ("%rd0 + 2", "misaligned")],
)
def test_global_accesses(address, message):
    with pytest.raises(RuntimeError, match=message):
        run(f"st.global.b32 [{address}], %r0;")


def test_diverging_lanes_meet_again():
    body = """
        and.b32 %r2, %r0, 3;
        setp.eq.b32 %p2, %r2, 0;
        @%p2 bra SKIPPED;
        add.s32 %r0, %r0, 1000;
    SKIPPED:
        st.global.b32 [%rd1], %r0;
    """
    assert run(body) == [x if x % 4 == 0 else x + 1000 for x in range(64)]


def test_lanes_wait_for_each_other_at_a_barrier():
    """The branch is backwards: the lanes that take it reach the barrier first."""
    body = """
        bra.uni BEGIN;
    MEET:
        bar.sync 0;
        shfl.sync.bfly.b32 %r3, %r0, 1, 31, -1;
        st.global.b32 [%rd1], %r3;
        ret;
    BEGIN:
        and.b32 %r2, %r0, 1;
        setp.eq.b32 %p2, %r2, 0;
        @%p2 bra MEET;
        add.s32 %r0, %r0, 1000;
        bra.uni MEET;
    """
    assert run(body) == [x + 1001 if x % 2 == 0 else x - 1 for x in range(64)]


SEND = "@%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd0], [0], 256; cp.async.bulk.commit_group;"
FENCE = "fence.proxy.async.shared::cta;"
STORED = "mul.lo.u32 %r2, %r0, 3; st.shared.b32 [%r1], %r2;"


def test_a_bulk_store_needs_a_proxy_fence():
    assert run(f"{STORED} {FENCE} bar.sync 0; {SEND} cp.async.bulk.wait_group 0;") == [3 * x for x in range(64)]
    # The reader's fence serves as well, if it follows the barrier.
    assert run(f"{STORED} bar.sync 0; {FENCE} {SEND}") == [3 * x for x in range(64)]
    for body in (f"{STORED} bar.sync 0; {SEND}", f"{FENCE} {STORED} bar.sync 0; {SEND}"):
        with pytest.raises(Fault, match=r"a bulk store reads what warp \d has written, with no fence\.proxy\.async"):
            run(body)


def test_shared_memory_that_a_bulk_store_reads_must_not_change():
    overwritten = f"{STORED} {FENCE} bar.sync 0; {SEND} {{wait}} bar.sync 0; st.shared.b32 [%r1], %r0;"
    assert run(overwritten.format(wait="cp.async.bulk.wait_group.read 0;")) == [3 * x for x in range(64)]
    with pytest.raises(Fault, match="changed before an asynchronous store had read it"):
        run(overwritten.format(wait=""))


LOAD = """
    @%p0 mbarrier.init.shared::cta.b64 [512], 1;
    bar.sync 0;
    @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [512], 256;
    @%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [0], [%rd0], 256, [512];
    {wait}
    ld.shared.b32 %r2, [%r1];
    add.s32 %r2, %r2, 1;
    st.global.b32 [%rd1], %r2;
    {at_end}
"""
WAIT = "LOOP: mbarrier.try_wait.parity.shared::cta.b64 %p3, [512], 0; @!%p3 bra LOOP;"


@pytest.mark.parametrize("seed", range(5))
def test_a_bulk_load_completes_on_its_mbarrier(seed):
    assert run(LOAD.format(wait=WAIT, at_end=""), seed=seed) == list(range(1, 65))


def test_a_bulk_load_that_is_not_waited_for():
    assert any(run(LOAD.format(wait="", at_end=WAIT), seed=seed) != list(range(1, 65)) for seed in range(5))
    with pytest.raises(Fault, match="arrives in the shared memory of a CTA that has ended"):
        [run(LOAD.format(wait="", at_end=""), seed=seed) for seed in range(5)]


def test_mbarriers_that_are_missing_or_complete():
    with pytest.raises(Fault, match="no mbarrier at 512"):
        run("@%p0 mbarrier.arrive.shared::cta.b64 _, [512], 1;")
    with pytest.raises(Fault, match="more threads arrive at an mbarrier than it expects"):
        run("@%p0 mbarrier.init.shared::cta.b64 [512], 3; bar.sync 0; mbarrier.arrive.shared::cta.b64 _, [512], 2;")


@pytest.mark.parametrize("barrier", ["", "bar.sync 0;"])
def test_an_mbarrier_needs_a_barrier_after_its_initialization(barrier):
    initialize = "@%p0 mbarrier.init.shared::cta.b64 [512], 64;"
    faults = []
    for seed in range(10):
        try:
            run(f"{initialize} {barrier} mbarrier.arrive.shared::cta.b64 _, [512], 1;", seed=seed)
        except Fault as fault:
            faults.append("uses an mbarrier that warp 0 has initialized, with no barrier between" in str(fault))
    assert any(faults) if barrier == "" else not faults
