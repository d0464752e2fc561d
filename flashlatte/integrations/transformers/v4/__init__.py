"""DeepSeek-V4 in transformers: windows, groups and their states in pages, attention by FlashLatte's layer."""
