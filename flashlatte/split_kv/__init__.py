"""Split-KV: the split of keys over CTAs, and the combination of partial outputs."""
