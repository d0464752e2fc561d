"""Runs compiled kernels on a CPU, from their PTX: warps, shared memory, barriers, TMA and tensor cores of Hopper.

Triton's interpreter runs the source of a Triton kernel; it has no Gluon, no warps and nothing asynchronous. This
package runs the PTX that Triton compiles, of Gluon kernels too. It runs warps in a random order, and lets asynchronous
copies take place at random times: as late as the kernel's waits allow. It raises ``Fault`` for

* an access outside of the tensors, or a misaligned one;
* a read of shared memory that another warp has written with no barrier between;
* a read by TMA or by tensor cores that misses a ``fence.proxy.async`` after writes by threads;
* shared memory that changes before a tensor core or a TMA store has read it;
* a barrier that more threads arrive at than it expects, and warps that wait for ever.

It says nothing about time, and does not run ptxas, whose defects it cannot show. ``emulated.emulate`` is the way in.
"""
