"""Absorbed decode in Gluon for sm_90: `decode` launches it, `rounds` plans it, `seesaw` and `swap` are the kernels."""
