"""Tier 2 by FlashInfer.

`tier` is the tier, `absorbed` its short queries, `blackwell` its forms for Blackwell, `library` the library and what it
refuses.
"""
