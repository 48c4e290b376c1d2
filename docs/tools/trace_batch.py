"""Draw a decode batch from a request trace, as `mla bench --batch` takes it: requests in the middle of an answer.

    mla bench triton flashmla --batch $(python docs/tools/trace_batch.py TRACE.jsonl --requests 64)

A request's context is its prompt and the part of its answer that is there already, from nothing to all of it, evenly.
"""

import argparse
import random
from pathlib import Path

from mla.errors import bad
from mla.serving.traces import read_trace


def batch_of(trace: Path, requests: int, seed: int) -> str:
    """Return the spec of `requests` decode requests drawn without putting back, `1q1s<keys>` each.

    Raises ValueError where the trace has fewer requests than that.
    """
    found = list(read_trace(trace))
    if len(found) < requests:
        raise bad(
            "--requests",
            expected=f"at most {len(found)}, what {trace.name} has",
            got=str(requests),
            fix="ask for fewer",
        )
    draw = random.Random(seed)
    return "_".join(f"1q1s{r.input_length + draw.randint(1, r.output_length)}" for r in draw.sample(found, requests))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    print(batch_of(asked.trace, asked.requests, asked.seed))
