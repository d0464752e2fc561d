"""FlashLatte's kernels and those of other libraries, timed alternately."""
