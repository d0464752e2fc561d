"""Top-k on Hopper: one launch, a CTA or a cluster of them for a row.

A sample of the row gives a threshold that some more than k entries should pass. The row is read once, and those that
pass are listed in shared memory, in any order (``candidates``). The k-th largest of them is found ten bits at a time,
by counting digits (``digits``). Which entries come before an entry is read from a bitmap of the row, so that results
are in ascending order and ties go to the lowest index. Where the list does not hold at least k entries, or cannot hold
all that pass, the row itself is counted (``rows``). Sampling decides how fast a row is, never its result.
"""
