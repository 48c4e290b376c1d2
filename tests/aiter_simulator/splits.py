"""The non-persistent decode: a grid of (query tile, request, key split) and a second stage that merges the splits.

Written from aiter.md 1.3, 4 and 8.3 (`ROCm/aiter` e4048607). How many splits the library chooses by occupancy is not
described there: `default_splits` is an estimate.
"""

from itertools import pairwise

from torch import Tensor

from . import kernels
from .attention import merge
from .call import NAN, Call, store
from .checks import abort_unless, check_indptr, fresh
from .planner import ceil_div

FP8_SPLIT_ROWS = (8, 16, 24, 32, 48, 64, 128, 256, 384, 512)


def default_splits(call: Call, formats: tuple[str, str], heads: int) -> int:
    """Splits by occupancy, 1 to 16: an estimate; the fp8 table lookup and its KeyError are the library's."""
    if formats[0] == "fp8" and heads * call.qlen not in FP8_SPLIT_ROWS:
        raise KeyError(heads * call.qlen)
    batch = len(call.qo) - 1
    useful = max(1, call.indices.numel() // max(1, batch) // 256)
    return max(1, min(16, call.machine.cu_num // max(1, batch), useful))


def split_decode(
    call: Call, formats: tuple[str, str], splits: int | None, splits_indptr: Tensor | None, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """The non-persistent path: query rows are found by b * qlen, keys are cut into a fixed number of splits."""
    machine, q, o, qlen = call.machine, call.q, call.o, call.qlen
    heads, batch = q.shape[1], len(call.qo) - 1
    found = kernels.lookup(machine.arch, *formats, "nps", heads, qlen)
    if splits is None:
        splits = default_splits(call, formats, heads)
    abort_unless(found, f"cannot get heuristic kernel: {machine.arch} {formats} nps H{heads} qlen {qlen}")
    abort_unless(not (formats == ("bf16", "bf16") and heads == 64), "ASM decode faults")
    abort_unless(batch * qlen <= len(q), f"qo_indptr: {batch} requests of {qlen} rows do not fit into {len(q)}")
    counts = [splits] * batch
    if splits_indptr is not None:
        ends = check_indptr("num_kv_splits_indptr", splits_indptr)
        counts = [min(splits, b - a) for a, b in pairwise(ends)]
    machine.calls.append(f"decode nps {splits}")
    granule = 16
    if heads in (8, 16) and (qlen == 1 or (heads, qlen) == (8, 2)):
        granule = 64
    elif (heads, *formats) == (128, "fp8", "fp8"):
        granule = 32
    partial, partial_lse = fresh((len(q), splits, heads, machine.rank)), fresh((len(q), splits, heads))
    # gfx942 H16 from qlen 5 on (aiter #5679) is wrong; a qlen that is no power of two repeats row 0 (aiter #2720).
    wrong = machine.arch == "gfx942" and heads == 16 and qlen > 4
    lse = fresh(q.shape[:2])
    for b in range(batch):
        first, stop = call.kv_indptr[b : b + 2]
        length, rows = stop - first, slice(b * qlen, (b + 1) * qlen)
        valid = max(1, min(counts[b], ceil_div(length, granule)))
        size = ceil_div(length, valid)
        edges = [min(i * size, length) for i in range(valid + 1)]
        for i, (a, z) in enumerate(pairwise(edges)):
            out, out_lse = call.attend(q[rows], b, first + a, first + z, length - qlen - a)
            partial[rows, i], partial_lse[rows, i] = out, out_lse
        outs, lses = partial[rows, :valid].transpose(0, 1), partial_lse[rows, :valid].transpose(0, 1)
        out, lse[rows] = merge(outs, lses)
        if qlen & (qlen - 1):
            out, lse[rows] = out[:1].expand_as(out), lse[rows][:1].expand(qlen, -1)
        store(o, rows, out.fill_(NAN) if wrong else out)
    both16 = formats == ("bf16", "bf16")
    if splits == 1 and (formats[0] == "fp8" or qlen == 4 or (both16 and heads in (8, 32))):
        lse = fresh(q.shape[:2])
    return (o if splits == 1 else partial), (lse if return_lse else None)
