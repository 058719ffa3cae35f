"""Figures of the toy experiments, from their results only."""
