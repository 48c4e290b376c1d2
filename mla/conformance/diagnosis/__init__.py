"""Not just a verdict: what kind of fault the error looks like, from its shape and from what would explain it.

`diagnose` looks at one failing case: `shapes` reads the pattern of the error, and a few rows are computed anew under
each hypothesis of `scores`, `keys`, `pages`, `splits`, `merge` and `out`. `combine` ranks the guesses of several cases.
"""

from mla.conformance.diagnosis.diagnose import KIND_NAMES, Diagnosis, Place, combine, diagnose, diagnose_status
from mla.conformance.diagnosis.ranking import Guess

__all__ = ["KIND_NAMES", "Diagnosis", "Guess", "Place", "combine", "diagnose", "diagnose_status"]
