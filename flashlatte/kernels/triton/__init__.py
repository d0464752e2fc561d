"""Triton device code that several operations use unchanged."""
