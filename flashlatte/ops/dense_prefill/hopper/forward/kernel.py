"""The kernel: allocate shared memory, and run the two consumers and the producer."""

# Triton's annotations and calls are not Python's.
# pyright: reportCallIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.prefill_consumers import consume
from flashlatte.kernels.hopper.two_consumers import CONSUMER_REGISTERS, PRODUCER_REGISTERS, ROWS, PrefillArgs
from flashlatte.ops.dense_prefill.hopper.forward import producer, tiles
from flashlatte.ops.dense_prefill.hopper.forward.epilogue import DensePrefillResults, store
from flashlatte.ops.dense_prefill.hopper.forward.out_of_range_keys import zero_values
from flashlatte.ops.dense_prefill.hopper.forward.producer import DensePrefillInputs
from flashlatte.ops.dense_prefill.hopper.forward.schedule import DensePrefillWork
from flashlatte.ops.dense_prefill.hopper.forward.tiles import read_work_tile
from flashlatte.runtime.triton_kernel import gluon_kernel


@gluon.jit
def _consume(args, FIRST_ROW: gl.constexpr, CONFIG: gl.constexpr):
    # Triton 3.6 accepts no functions among the arguments of a partition.
    consume(args, FIRST_ROW, CONFIG, read_work_tile, zero_values, store)


@gluon_kernel
def dense_prefill_forward_kernel(
    inputs: DensePrefillInputs,
    work: DensePrefillWork,
    results: DensePrefillResults,
    scale_log2: tl.float32,
    CONFIG: tl.constexpr,
):
    """A persistent kernel: each program processes tiles of 128 query rows of a head until none are left. Arguments as
    in ``launch``."""
    shared = tiles.allocate(results.out.dtype.element_ty, CONFIG)
    args = PrefillArgs(shared, work.window, scale_log2, results)
    gl.warp_specialize(
        [
            (_consume, (args, 0, CONFIG)),
            (_consume, (args, ROWS, CONFIG)),
            (producer.produce, (inputs, work, shared)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
