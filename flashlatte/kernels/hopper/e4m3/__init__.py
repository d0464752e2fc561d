"""Attention with products in e4m3: quantized queries, e4m3 keys and values, and P in e4m3.

```
loader         four warps   fills a ring of four blocks of 64 keys
even consumer  four warps   scores of block 0 → softmax → P; left half of the columns of outᵀ = Vᵀ · Pᵀ
odd consumer   four warps   the same for block 1 and the right half
```

WGMMA takes e4m3 operands only with adjacent keys, and rows of keys have adjacent columns. So the output is transposed:
values go through registers, which transposes them (``kernels.hopper.ptx.e4m3_values``), and P through shared memory.

A kernel supplies its loader, its mask, its queries and its epilogue.
"""
