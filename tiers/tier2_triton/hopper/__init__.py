"""Gluon for sm_90: `decode` launches `seesaw` or `swap` and `combine`, as `schedule` says; `prefill`, `prefill_kernel`.

`protocol` and `explore` model who waits for whom and import no triton.
"""
