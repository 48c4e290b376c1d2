"""Where a run ran: what a figure depends on beside the code."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

OUTPUTS = ("--json", "--junit", "--html")


def environment(device: str = "cpu") -> dict[str, Any]:
    """Return what a figure depends on beside the code: versions, platform, processor, device, threads, git commit."""
    import numpy
    import torch

    cuda = device.startswith("cuda") and torch.cuda.is_available()
    return {
        "mla": own_version(),
        "commit": _commit(Path(__file__).parents[2]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version(),
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if cuda else device,
    }


def triton_version() -> str | None:
    """Return the version of triton, and that it interprets where TRITON_INTERPRET says so; None where there is none."""
    try:
        found = version("triton")
    except PackageNotFoundError:
        return None
    return f"{found}, interpreted" if os.environ.get("TRITON_INTERPRET") == "1" else found


def invocation(argv: Sequence[str] | None = None) -> str | None:
    """Return the command line of this process without where it writes, None where it is not that of a command."""
    program, *words = sys.argv if argv is None else argv
    if Path(program).stem not in ("mla", "__main__"):
        return None
    kept, skip = [], False
    for word in words:
        if not skip and word.partition("=")[0] not in OUTPUTS:
            kept.append(word)
        skip = not skip and word in OUTPUTS
    return shlex.join(["mla", *kept])


def own_version() -> str:
    """Return the version of this distribution."""
    try:
        return version("mla-tiers")
    except PackageNotFoundError:
        return "not installed"


def _commit(root: Path) -> str | None:
    """The commit of a git work tree, with "+changes" where tracked files differ from it; None outside of one."""
    if not (root / ".git").exists():
        return None
    try:
        changes = _git(root, "status", "--porcelain", "--untracked-files=no")
        return _git(root, "rev-parse", "--short=12", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
