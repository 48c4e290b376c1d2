"""Multi-head Latent Attention: the concepts, the contract of a tier, the float64 oracle and the error budget.

`mla` says what MLA is; `tiers` says how to compute it. Start at `mla.attention` (both forms side by side).
"""
