"""Top-k on Hopper in one launch, with one CTA or cluster per row.

A sample of the row gives a threshold that slightly more than k entries should reach. The kernel reads the row once and
appends the entries that reach it to a list in shared memory, in any order (``candidates``). A radix select with digits
of ten bits finds the k-th largest candidate (``digits``). A bitmap of the row gives the output position of each
selected entry, so that results are in ascending order of index and ties go to the lowest index (``store_largest``). If
the list has fewer than k entries, or more than fit, the radix select runs on the row in global memory
(``radix_select``). Sampling affects the time only, never the result.

If all rows run at the same time, a row of up to 8,192 entries takes a shorter way (``short_row``): one CTA holds its
keys in registers, so it needs neither a sample nor a list. The kernel chooses by the length on the device.
"""
