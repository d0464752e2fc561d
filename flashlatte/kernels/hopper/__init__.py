"""Gluon device code for SM90 that several operations share."""
