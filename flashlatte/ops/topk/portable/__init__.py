"""Top-k in Triton.

A sample of a row gives a threshold that slightly more than k entries should reach; these are the candidates
(``filter``). If there are at least k candidates and they fit their buffer, the result is selected from them, exactly,
in registers (``finish``). Otherwise a radix select reads the row again. Sampling affects the speed only, not the
result.
"""
