"""Tier 2 by AITER, AMD's kernel library for gfx942 and gfx950: see `tiers.tier2_aiter.tier`."""
