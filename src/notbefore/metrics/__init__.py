"""Metrics: their definitions, and the counts that they are computed from."""
