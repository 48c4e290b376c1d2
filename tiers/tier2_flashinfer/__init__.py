"""Tier 2 by FlashInfer: `tier` is the tier, `absorbed` its short queries, `library` the library and what it refuses."""
