"""The attention operations, one folder each."""
