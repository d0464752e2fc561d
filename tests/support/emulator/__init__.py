"""Runs compiled kernels on a CPU, from their PTX: warps, shared memory, barriers, TMA and tensor cores of Hopper.

Triton's interpreter runs the source of a Triton kernel; it supports neither Gluon, warps nor asynchronous operations.
This package runs the PTX that Triton compiles, also of Gluon kernels. Warps run in a random order, and asynchronous
copies complete at random times, at the latest when the kernel's waits require it. It raises ``Fault`` for

* an access outside of the tensors, or a misaligned one;
* a read of shared memory that another warp has written, without a barrier in between;
* a read by TMA or by tensor cores without a ``fence.proxy.async`` after writes by threads;
* a write to shared memory before a tensor core or a TMA store has read it;
* a copy that arrives in shared memory after its CTA has ended;
* a use of an mbarrier that another warp has initialized, without a barrier in between;
* a barrier at which more threads arrive than it expects, and deadlocks.

It measures no time, and does not run ptxas, whose defects it cannot find. ``emulated.Emulation`` is the entry point.
"""
