"""The largest sizes on a machine without a GPU, which runs the same code."""

SMALL_BATCH, SMALL_HEADS, SMALL_KEYS, SMALL_TOPK, SMALL_QUERIES = 2, 16, 256, 64, 16
