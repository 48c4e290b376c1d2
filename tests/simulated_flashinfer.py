"""The FlashInfer tier over the stand-in, as a tier file: `mla check tests/simulated_flashinfer.py --suite smoke`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import flashinfer_standin

from tiers.tier2_flashinfer.tier import FlashInferTier

tier = FlashInferTier(library=flashinfer_standin)
