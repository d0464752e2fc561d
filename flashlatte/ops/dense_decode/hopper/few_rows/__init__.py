"""Dense decode of at most 16 query rows with a cache of one-byte elements: transposed scores, keys × rows.

The left operand of a WGMMA has 64 rows. Here these are keys for the scores and value columns for the output; the query
rows are the right operand, 16 columns. No padding is multiplied, and the remaining shared memory buffers keys:

```
loader    one warp    boxes of the cache into a ring, by TMA                              (``loader``)
caster    four warps  from the ring into tiles of float16, exactly                        (``caster``)
consumer  four warps  scores of a block [64 keys, 16], their softmax, the output [512, 16]  (``consumer``)
```

Tiles are float16 for any dtype of the queries, because Hopper converts e4m3 to float16 in one instruction. A query row
is scaled by a power of two that brings its maximum to the top of float16's range; elements below 2^-28 of the maximum
lose bits. P is at most 2^7, and loses bits below 2^-21 of that.
"""
