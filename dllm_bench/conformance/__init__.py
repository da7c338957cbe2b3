"""Conformance: checks that every method and memory passes, on random fixture models that need no checkpoint."""
