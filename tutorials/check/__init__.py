"""Instant checks of the exercises: one module for each notebook, `verdict.py` for all of them."""
