"""FlashLatte inside other libraries. Each module imports its host only when it is used."""
