"""What compiled code for NVIDIA takes and does, read out of it by the tools that come with triton.

Registers and stack say whether a kernel fits. How often it goes to local memory, and how many instructions its products
became, says whether the compiler laid it out as it was meant: numbers that stay in registers for one loop, descriptors
that are made once, products that are not cut up.
"""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

# Of an instruction all up to the first point: wgmma, and loads and stores of what does not fit in registers.
PRODUCT, LOCAL_LOAD, LOCAL_STORE = "HGMMA", "LDL", "STL"


def resources(cubin: bytes, name: str) -> tuple[int, int]:
    """Return registers and bytes of stack of a thread of the kernel `name`; raises RuntimeError where it is not found.

    A Triton kernel has no variables in memory: its stack is spills.
    """
    said = _said_of(cubin, "-res-usage")
    found = re.search(rf"Function {re.escape(name)}:\s+REG:(\d+) STACK:(\d+)", said)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of {name}: {said}")
    return int(found[1]), int(found[2])


def instructions(cubin: bytes) -> Counter[str]:
    """Return how often each instruction stands in compiled code, by its name without what follows a point.

    Counted in the text: one in a loop counts once. Raises RuntimeError where there is no code.
    """
    found = counted(_said_of(cubin, "-sass"))
    if not found:
        raise RuntimeError("cuobjdump shows no instructions")
    return found


def counted(text: str) -> Counter[str]:
    """Return the instructions of a listing; one on a line, after its address and, sometimes, a predicate."""
    return Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z]\w*)", text, re.MULTILINE))


def _said_of(cubin: bytes, option: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        return subprocess.run([tool, option, file], capture_output=True, text=True, check=True).stdout
