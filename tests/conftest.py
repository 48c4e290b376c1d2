"""What every test shares: one torch thread, hypothesis without clock or chance, no settings of the caller."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Several test processes share few cores; more threads each would only fight.
torch.set_num_threads(1)

# A deadline fails on a busy machine and a random seed fails once in a hundred runs: neither says anything of the code.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _no_settings_from_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("MLA_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """Folder of full-size public request traces beside the repository; skips where it is absent."""
    folder = Path(__file__).parents[2] / "shared" / "traces"
    if not folder.is_dir():
        pytest.skip("no folder ../shared/traces beside the repository: full-size traces are not checked here")
    return folder
