"""What one step asks for: which new tokens, over which cached keys, on which pages.

Axes: T new tokens (packed over requests), B requests, S cached tokens.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mla.errors import bad

MASKS = ("causal", "full", "rows")


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """The metadata of one step, shared by all layers: device tensors for kernels, host copies for planners.

    query_start_loc (B+1,), seq_lens (B,), block_table (B, max_pages), row_kv_lens (T,) are int32; slot_mapping (T,)
    and positions (T,) are int64; all on one device. `row_kv_lens[i]` is how many keys of its request row i sees, the
    only thing a kernel masks by; 0 marks an empty row (padding, a rank without keys). `slot_mapping[i] = -1` means
    only: do not write row i. Rows past query_start_loc[-1] belong to no request. The class takes any
    0 <= row_kv_lens <= seq_lens and trusts it; build with `AttentionBatch.bottom_right` to have it checked.
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

    def select(self, requests: Sequence[int]) -> tuple["AttentionBatch", Tensor]:
        """Return the batch of some requests, in the given order, and the rows (n,) int64 of this batch that it consists of."""
        starts = [0, *accumulate(self.query_lens_host)]
        device = self.seq_lens.device
        rows = torch.tensor([i for b in requests for i in range(starts[b], starts[b + 1])], dtype=torch.int64, device=device)
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
        q, s = _lengths("query_lens", query_lens), _lengths("seq_lens", seq_lens)
        if len(q) != len(s):
            raise bad("seq_lens", expected=f"{len(q)} entries, one per query_len", got=str(len(s)), fix="give both per request")
        if mask not in ("causal", "full"):
            raise bad("mask", expected="'causal' or 'full'", got=repr(mask), fix="for other row bounds use AttentionBatch.rows")
        for i, (ql, sl) in enumerate(zip(q, s, strict=True)):
            if 0 < sl < ql:
                raise bad(f"seq_lens[{i}]", expected=f"0, or at least query_lens[{i}] = {ql}", got=str(sl), fix="count the new tokens too")
        bounds = [_visible(ql, sl, mask) for ql, sl in zip(q, s, strict=True)]
        return cls.rows(
            q, s, block_table, [b for part in bounds for b in part],
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
        than a row has, so any 0 <= row_kv_lens <= seq_lens is taken.
        """
        q, s = _lengths("query_lens", query_lens), _lengths("seq_lens", seq_lens)
        visible = _lengths("row_kv_lens", row_kv_lens)
        if page_size < 1:
            raise bad("page_size", expected="at least 1", got=str(page_size), fix="use the cache's page size")
        if mask not in MASKS:
            raise bad("mask", expected=f"one of {MASKS}", got=repr(mask), fix="'rows' for explicit bounds")
        owners = [r for r, ql in enumerate(q) for _ in range(ql)]
        if len(visible) != len(owners):
            raise bad("row_kv_lens", expected=f"{len(owners)} entries, one per new token", got=str(len(visible)), fix="sum(query_lens) rows")
        for i, (v, r) in enumerate(zip(visible, owners, strict=True)):
            if v > s[r]:
                raise bad(f"row_kv_lens[{i}]", expected=f"at most seq_lens[{r}] = {s[r]}", got=str(v), fix="a row sees only its request's keys")
        table = _table(block_table, s, page_size, num_pages)
        positions = [max(sl - ql, 0) + i for ql, sl in zip(q, s, strict=True) for i in range(ql)]
        slot_mapping = _slots(slots, owners, positions, s, table, page_size, num_pages)
        pad = [0] * pad_tokens
        as_int32 = lambda values: torch.tensor(values, dtype=torch.int32, device=device)
        return cls(
            query_start_loc=as_int32([0, *accumulate(q)]),
            seq_lens=as_int32(s),
            block_table=table.to(device),
            slot_mapping=torch.cat([slot_mapping, torch.full((pad_tokens,), -1)]).to(device),
            positions=torch.tensor(positions + pad, dtype=torch.int64, device=device),
            row_kv_lens=as_int32(visible + pad),
            mask=mask,
            query_lens_host=tuple(q),
            seq_lens_host=tuple(s),
            page_size=page_size,
        )


def parse_batch(text: str) -> tuple[list[int], list[int]]:
    """Read the batch grammar: `16q1s4k` is 16 requests of 1 new token over 4096 keys; parts are joined by `_`.

    Each part is [count]q[query_len]s[seq_len]; a part without `s` has seq_len = query_len (a fresh prompt). Numbers
    may end in `k` (x 1024). Returns (query_lens, seq_lens) in tokens, seq_lens counting the new tokens.
    Raises ValueError with the part that does not fit. Example: `2q2k_32q1s1k`.
    """
    query_lens: list[int] = []
    seq_lens: list[int] = []
    for part in text.split("_"):
        match = re.fullmatch(r"(\d*)q(\d+k?)(?:s(\d+k?))?", part)
        if match is None:
            raise bad("batch", expected="parts such as 16q1s4k or 2q2k joined by '_'", got=repr(part), fix="write COUNTqNEWsKEYS")
        count, query, seq = match[1] or "1", _number(match[2]), _number(match[3] or match[2])
        if seq < query:
            raise bad("batch", expected=f"at least {query} keys in {part!r}", got=str(seq), fix="s counts the new tokens too")
        query_lens += [query] * int(count)
        seq_lens += [seq] * int(count)
    return query_lens, seq_lens


def _number(text: str) -> int:
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


def _visible(query_len: int, seq_len: int, mask: str) -> list[int]:
    if seq_len == 0:
        return [0] * query_len
    return [seq_len] * query_len if mask == "full" else [seq_len - query_len + i + 1 for i in range(query_len)]


def _lengths(name: str, values: Sequence[int] | Tensor) -> list[int]:
    if isinstance(values, Tensor):
        if values.dim() != 1 or values.is_floating_point() or values.dtype == torch.bool:
            got = f"{values.dtype} of shape {tuple(values.shape)}"
            raise bad(name, expected="integers of shape (n,)", got=got, fix=f"pass {name}.flatten().int()", kind=TypeError)
        values = values.tolist()
    out = list(values)
    for i, v in enumerate(out):
        if isinstance(v, bool) or not isinstance(v, int):
            raise bad(f"{name}[{i}]", expected="an int", got=repr(v), fix="convert the lengths to int", kind=TypeError)
        if v < 0 or v >= 2**31:
            raise bad(f"{name}[{i}]", expected="0 .. 2^31 - 1", got=str(v), fix="lengths are counts of tokens")
    return out


def _table(table: Sequence[Sequence[int]] | Tensor, seq_lens: list[int], page_size: int, num_pages: int) -> Tensor:
    if isinstance(table, Tensor):
        if table.dim() != 2 or table.is_floating_point():
            got = f"{table.dtype} of shape {tuple(table.shape)}"
            raise bad("block_table", expected="integers of shape (B, max_pages)", got=got, fix="one row of page ids per request", kind=TypeError)
        host = table.cpu().to(torch.int64)
    else:
        width = max((len(row) for row in table), default=0)
        host = torch.tensor([[*row, *[-1] * (width - len(row))] for row in table], dtype=torch.int64).reshape(len(table), width)
    if host.shape[0] != len(seq_lens):
        raise bad("block_table", expected=f"{len(seq_lens)} rows, one per request", got=str(host.shape[0]), fix="add or drop rows")
    for i, s in enumerate(seq_lens):
        pages = -(-s // page_size)
        own = host[i, :pages]
        if own.shape[0] < pages:
            got = f"{host.shape[1]} for {s} keys of page_size {page_size}"
            raise bad(f"block_table[{i}]", expected=f"at least {pages} pages", got=got, fix="allocate more pages to the request")
        if pages and (int(own.min()) < 0 or int(own.max()) >= num_pages):
            wrong = own[(own < 0) | (own >= num_pages)][0]
            raise bad(f"block_table[{i}]", expected=f"page ids 0 .. {num_pages - 1}", got=str(int(wrong)), fix="use pages of this pool")
    return host.clamp(-(2**31), 2**31 - 1).to(torch.int32)


def _slots(slots, owners, positions, seq_lens, table: Tensor, page_size: int, num_pages: int) -> Tensor:
    if slots is None:
        at = torch.tensor(positions, dtype=torch.int64)
        owner = torch.tensor(owners, dtype=torch.int64)
        if not len(positions) or table.shape[1] == 0:
            return torch.full((len(positions),), -1, dtype=torch.int64)
        has_keys = torch.tensor(seq_lens, dtype=torch.int64)[owner] > 0
        page = table[owner, torch.where(has_keys, at // page_size, 0)].to(torch.int64)
        return torch.where(has_keys, page * page_size + at % page_size, -1)
    host = slots.cpu() if isinstance(slots, Tensor) else torch.tensor(list(slots))
    if host.is_floating_point() and host.numel():
        raise bad("slots", expected="integers", got=str(host.dtype), fix="slot = page * page_size + position in page", kind=TypeError)
    host = host.to(torch.int64)
    if host.shape != (len(positions),):
        raise bad("slots", expected=f"({len(positions)},), one per new token", got=str(tuple(host.shape)), fix="use -1 for rows not written")
    if host.numel() and (int(host.min()) < -1 or int(host.max()) >= num_pages * page_size):
        wrong = host[(host < -1) | (host >= num_pages * page_size)][0]
        raise bad("slots", expected=f"-1 .. {num_pages * page_size - 1}", got=str(int(wrong)), fix="write inside the pool")
    used = host[host >= 0]
    if used.unique().numel() != used.numel():
        raise bad("slots", expected="each slot at most once", got="a slot written twice", fix="give every new token its own slot")
    return host
