"""Top-k in Triton.

A sample of a row gives a threshold that some more than k entries should pass; those that do are the candidates
(``filter``). Are they at least k and do they fit their place, then the result is among them, and is found exactly in
registers (``finish``). Otherwise the row is read again, by radix. Sampling decides how fast a row is, never its result.
"""
