"""DeepSeek-V4 in transformers: windows, groups and states in pages, attention by FlashLatte's layer."""
