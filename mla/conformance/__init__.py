"""The conformance kit: cases by name, inputs by formula, poisoned memory, and the runner behind `mla check`.

```python
results = list(check(tiers.get("paged"), suite("smoke")))
print(summary(results))
```
"""

from mla.conformance.cases import Case, find, sample_rows
from mla.conformance.metamorphic import RELATIONS
from mla.conformance.runner import Result, check, run_case, summary
from mla.conformance.specs import SPECS, BatchSpec, spec
from mla.conformance.suites import suite

__all__ = [
    "RELATIONS",
    "SPECS",
    "BatchSpec",
    "Case",
    "Result",
    "check",
    "find",
    "run_case",
    "sample_rows",
    "spec",
    "suite",
    "summary",
]
