"""Triton device code that several operations share."""
