"""The Triton kernels, one story a file: why it is there, the kernel, its wrapper, what it must equal, what it costs.

The only modules that import triton when they are imported; everybody else imports them inside functions.
"""
