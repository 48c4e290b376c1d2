"""Gluon for sm_90: `decode` launches `seesaw` or `swap` and `combine`, shared out by `schedule`; `prefill` is its own.

`protocol` and `explore` model who waits for whom and import no triton.
"""
