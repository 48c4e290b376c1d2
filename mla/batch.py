"""What one step asks for: which new tokens, over which cached keys, on which pages.

Axes: T new tokens (packed over requests), B requests, S cached tokens.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mla.checks import (
    INT32_MAX,
    check_device,
    check_int,
    check_written_once,
    given_slots,
    lengths,
    own_slots,
    page_table,
)
from mla.errors import bad

MASKS = ("causal", "full", "rows")
MAX_REQUESTS = 2**20  # of a batch that is written in the grammar


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """The metadata of one step, shared by all layers: device tensors for kernels, host copies for planners.

    query_start_loc (B+1,), seq_lens (B,), block_table (B, max_pages), row_kv_lens (T,) are int32; slot_mapping (T,)
    and positions (T,) are int64; all on one device. `row_kv_lens[i]` is how many keys of its request row i sees, the
    only thing a kernel masks by; 0 marks an empty row (padding, a rank without keys). `slot_mapping[i] = -1` means
    only: do not write row i. Rows past query_start_loc[-1] belong to no request. The class trusts
    that bounds are what `mask` says, any 0 <= row_kv_lens <= seq_lens with "rows"; build with
    `AttentionBatch.bottom_right` or `.rows` to have it checked.
    `num_pages` is the pool that pages and slots were checked against, None where they were not.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    positions: Tensor
    row_kv_lens: Tensor
    mask: str
    query_lens_host: tuple[int, ...]
    seq_lens_host: tuple[int, ...]
    page_size: int
    num_pages: int | None = None

    @property
    def num_tokens(self) -> int:
        """T: rows of the step, padding included."""
        return self.slot_mapping.shape[0]

    @property
    def num_requests(self) -> int:
        """B: requests of the step, padded ones included."""
        return len(self.query_lens_host)

    @property
    def max_query_len(self) -> int:
        """The longest query of the step in tokens; 0 for an empty batch."""
        return max(self.query_lens_host, default=0)

    @property
    def max_seq_len(self) -> int:
        """The most keys that a request of the step has; 0 for an empty batch."""
        return max(self.seq_lens_host, default=0)

    def row_blocks(self, heads: int, scores: int = 1 << 21) -> Iterator[tuple[int, slice]]:
        """Yield (request, rows) in order, the rows of a request cut so that heads * rows * keys is at most `scores`.

        Rows do not depend on each other, so a cut changes no number; a block has at least one row. A plain tier that
        materialises its scores stays within some megabytes that way.
        """
        first = 0
        for request, (query_len, seq_len) in enumerate(zip(self.query_lens_host, self.seq_lens_host, strict=True)):
            step = max(1, scores // max(1, heads * seq_len))
            for start in range(first, first + query_len, step):
                yield request, slice(start, min(start + step, first + query_len))
            first += query_len

    def select(self, requests: Sequence[int]) -> tuple["AttentionBatch", Tensor]:
        """Return the batch of some requests, in that order, and the rows (n,) int64 of this batch that it consists of.

        Raises ValueError for a request that is not in 0 .. B - 1.
        """
        for b in requests:
            if not 0 <= b < self.num_requests:
                raise bad("requests", expected=f"0 .. {self.num_requests - 1}", got=str(b), fix="count from 0")
        starts = [0, *accumulate(self.query_lens_host)]
        device = self.seq_lens.device
        chosen = [i for b in requests for i in range(starts[b], starts[b + 1])]
        rows = torch.tensor(chosen, dtype=torch.int64, device=device)
        index = torch.tensor(list(requests), dtype=torch.int64, device=device)
        lens = tuple(self.query_lens_host[b] for b in requests)
        part = AttentionBatch(
            query_start_loc=torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device),
            seq_lens=self.seq_lens[index],
            block_table=self.block_table[index],
            slot_mapping=self.slot_mapping[rows],
            positions=self.positions[rows],
            row_kv_lens=self.row_kv_lens[rows],
            mask=self.mask,
            query_lens_host=lens,
            seq_lens_host=tuple(self.seq_lens_host[b] for b in requests),
            page_size=self.page_size,
            num_pages=self.num_pages,
        )
        return part, rows

    @classmethod
    def bottom_right(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_table: Sequence[Sequence[int]] | Tensor,
        *,
        page_size: int,
        num_pages: int,
        mask: str = "causal",
        slots: Sequence[int] | Tensor | None = None,
        pad_tokens: int = 0,
        device: torch.device | str = "cpu",
    ) -> "AttentionBatch":
        """Build a step in which the last query row of each request sees all its keys.

        Row i of a request with query_len q and seq_len s sees keys 0 .. s - q + i (mask "causal") or all s keys
        ("full"). `block_table` is (B, max_pages), host lists or an integer tensor; entries past a request's last page
        may hold anything. `slots` (T,) overrides where rows are written (-1: not written); the default writes every new
        token at its own position. `pad_tokens` adds that many empty rows. Raises ValueError or TypeError that names the
        argument for lengths that contradict each other, pages outside the pool, a table too short, slots outside it.
        """
        q, s = _requests(query_lens, seq_lens)
        if mask not in ("causal", "full"):
            fix = "for other row bounds use AttentionBatch.rows"
            raise bad("mask", expected="'causal' or 'full'", got=repr(mask), fix=fix)
        for i, (ql, sl) in enumerate(zip(q, s, strict=True)):
            if 0 < sl < ql:
                expected = f"0, or at least query_lens[{i}] = {ql}"
                raise bad(f"seq_lens[{i}]", expected=expected, got=str(sl), fix="count the new tokens too")
        bounds = [v for ql, sl in zip(q, s, strict=True) for v in _visible(ql, sl, mask)]
        return cls.rows(
            q, s, block_table, bounds,
            page_size=page_size, num_pages=num_pages, mask=mask, slots=slots, pad_tokens=pad_tokens, device=device,
        )  # fmt: skip

    @classmethod
    def rows(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_table: Sequence[Sequence[int]] | Tensor,
        row_kv_lens: Sequence[int],
        *,
        page_size: int,
        num_pages: int,
        mask: str = "rows",
        slots: Sequence[int] | Tensor | None = None,
        pad_tokens: int = 0,
        device: torch.device | str = "cpu",
    ) -> "AttentionBatch":
        """Build a step whose row bounds are given: `row_kv_lens` has one count of visible keys for each new token (T,).

        The other arguments and errors are those of `bottom_right`; a rank of context parallelism may hold fewer keys
        than a row has, so any 0 <= row_kv_lens <= seq_lens is taken. Without `slots`, a request with fewer keys than
        new tokens writes nothing, since where its tokens belong is not known here.
        """
        q, s = _requests(query_lens, seq_lens)
        visible = lengths("row_kv_lens", row_kv_lens, "(T,)")
        page_size = check_int("page_size", page_size, 1, "use the cache's page size")
        num_pages = check_int("num_pages", num_pages, 0, "pass the pages of the pool")
        pad_tokens = check_int("pad_tokens", pad_tokens, 0, "count the empty rows at the end")
        if mask not in MASKS:
            raise bad("mask", expected=f"one of {MASKS}", got=repr(mask), fix="'rows' for explicit bounds")
        owners = [r for r, ql in enumerate(q) for _ in range(ql)]
        if len(visible) != len(owners):
            expected, got = f"{len(owners)} entries, one per new token", str(len(visible))
            raise bad("row_kv_lens", expected=expected, got=got, fix="give sum(query_lens) counts")
        for i, (v, r) in enumerate(zip(visible, owners, strict=True)):
            if v > s[r]:
                expected, fix = f"at most seq_lens[{r}] = {s[r]}", "a row sees only its request's keys"
                raise bad(f"row_kv_lens[{i}]", expected=expected, got=str(v), fix=fix)
        if mask != "rows" and visible != [v for ql, sl in zip(q, s, strict=True) for v in _visible(ql, sl, mask)]:
            fix = "pass mask='rows', or use AttentionBatch.bottom_right"
            raise bad("row_kv_lens", expected=f"the bounds of mask {mask!r}", got="others", fix=fix)
        table = page_table(block_table, s, page_size, num_pages)
        positions = [max(sl - ql, 0) + i for ql, sl in zip(q, s, strict=True) for i in range(ql)]
        if slots is None:
            complete = [sl >= ql for ql, sl in zip(q, s, strict=True)]
            slot_mapping = own_slots(owners, positions, complete, table, page_size)
        else:
            slot_mapping = given_slots(slots, len(positions), num_pages * page_size)
        check_written_once(slot_mapping)
        check_device(device)
        pad = [0] * pad_tokens
        return cls(
            query_start_loc=torch.tensor([0, *accumulate(q)], dtype=torch.int32, device=device),
            seq_lens=torch.tensor(s, dtype=torch.int32, device=device),
            block_table=table.to(device),
            slot_mapping=torch.cat([slot_mapping, torch.full((pad_tokens,), -1)]).to(device),
            positions=torch.tensor(positions + pad, dtype=torch.int64, device=device),
            row_kv_lens=torch.tensor(visible + pad, dtype=torch.int32, device=device),
            mask=mask,
            query_lens_host=tuple(q),
            seq_lens_host=tuple(s),
            page_size=page_size,
            num_pages=num_pages,
        )


def parse_batch(text: str) -> tuple[list[int], list[int]]:
    """Read the batch grammar: `16q1s4k` is 16 requests of 1 new token over 4096 keys; parts are joined by `_`.

    Each part is [count]q[query_len]s[seq_len]; a part without `s` has seq_len = query_len (a fresh prompt). Numbers
    may end in `k` (x 1024). Returns (query_lens, seq_lens) in tokens, seq_lens counting the new tokens.
    Raises ValueError with the part that does not fit, or asks for more than 2^20 requests in all or for lengths of
    2^31 tokens. Example: `2q2k_32q1s1k`.
    """
    query_lens: list[int] = []
    seq_lens: list[int] = []
    for part in text.split("_"):
        match = re.fullmatch(r"([1-9]\d*)?q(\d+k?)(?:s(\d+k?))?", part, re.ASCII)
        if match is None:
            expected = "parts such as 16q1s4k or 2q2k joined by '_'"
            raise bad("batch", expected=expected, got=repr(part), fix="write COUNTqNEWsKEYS")
        count, query, seq = _number(match[1] or "1"), _number(match[2]), _number(match[3] or match[2])
        for got, most, what in (
            (len(query_lens) + count, MAX_REQUESTS, "requests"),
            (max(query, seq), INT32_MAX, "tokens"),
        ):
            if got > most:
                raise bad("batch", expected=f"at most {most} {what}", got=repr(part[:40]), fix="ask for fewer")
        if seq < query:
            expected, fix = f"at least {query} keys in {part!r}", "s counts the new tokens too"
            raise bad("batch", expected=expected, got=str(seq), fix=fix)
        query_lens += [query] * count
        seq_lens += [seq] * count
    return query_lens, seq_lens


def _number(text: str) -> int:
    digits = text.removesuffix("k").lstrip("0") or "0"
    number = int(digits) if len(digits) < 20 else 10**20  # past every limit; int() refuses thousands of digits
    return number * 1024 if text.endswith("k") else number


def _visible(query_len: int, seq_len: int, mask: str) -> list[int]:
    if seq_len == 0:
        return [0] * query_len
    return [seq_len] * query_len if mask == "full" else [seq_len - query_len + i + 1 for i in range(query_len)]


def _requests(query_lens: Sequence[int], seq_lens: Sequence[int]) -> tuple[list[int], list[int]]:
    q, s = lengths("query_lens", query_lens), lengths("seq_lens", seq_lens)
    if len(q) != len(s):
        expected = f"{len(q)} entries, one per query_len"
        raise bad("seq_lens", expected=expected, got=str(len(s)), fix="give both for each request")
    return q, s
