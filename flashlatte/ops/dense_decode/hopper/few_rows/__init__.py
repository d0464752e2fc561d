"""Dense decode of at most 16 query rows over a cache of one-byte numbers: scores as keys × rows.

A WGMMA takes 64 rows of its left operand, whatever there are. Here these are keys for the scores, and columns of the
values for the output; the query rows are its right operand, 16 columns. Nothing is multiplied that is not there, and
what is left of shared memory holds keys on their way:

```
loader    a warp      boxes of the cache into a ring, by TMA                              (``loader``)
caster    four warps  from the ring into tiles of float16, exactly                        (``caster``)
attender  four warps  scores of a block [64 keys, 16], their softmax, the output [512, 16]  (``attender``)
```

Tiles are float16 whatever the queries are: Hopper converts e4m3 to that by one instruction. A query row is multiplied
with a power of two that brings its largest number to the top of float16's range; numbers lose bits if they are below
2^-28 of it. P is 2^7 at most, and loses bits below 2^-21 of that.
"""
