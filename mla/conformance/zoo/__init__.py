"""Planted faults: tiers that are wrong in one known way each, which the conformance suite must reject.

```python
broken = fault("mask_top_left").tier()
print([r.case.id for r in check(broken, suite("smoke")) if not r.ok])
```
"""

import difflib

from mla.conformance.zoo.edits import EDITS
from mla.conformance.zoo.fault import KINDS, Fault
from mla.conformance.zoo.touches import TOUCHES
from mla.conformance.zoo.wrappers import WRAPPERS
from mla.errors import bad

FAULTS: dict[str, Fault] = {fault.name: fault for fault in (*EDITS, *WRAPPERS, *TOUCHES)}

__all__ = ["FAULTS", "KINDS", "Fault", "fault"]


def fault(name: str) -> Fault:
    """Return the planted fault of a name; raises ValueError with the nearest name where there is none."""
    if name not in FAULTS:
        near = difflib.get_close_matches(name, FAULTS, n=1)
        fix = f"did you mean {near[0]!r}?" if near else "`mla check --faults` lists them"
        raise bad("fault", expected="the name of a planted fault", got=repr(name), fix=fix)
    return FAULTS[name]
