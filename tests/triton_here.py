"""Where Triton kernels can run here: on a GPU, or in Triton's interpreter if the process was started for it."""

import os
from importlib.util import find_spec

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# The interpreter keeps bf16 as integers and is silently wrong there.
DTYPES = (torch.float32, torch.float16, *(() if INTERPRETED else (torch.bfloat16,)))


def require_triton() -> None:
    """Skip the calling module, with the reason, where no kernel can run in this process."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install 'mla-tiers[triton]'", allow_module_level=True)
    if DEVICE == "cpu" and not INTERPRETED:
        reason = (
            "no GPU, and the process was not started with TRITON_INTERPRET=1; `make test` runs these in a second run"
        )
        pytest.skip(reason, allow_module_level=True)
