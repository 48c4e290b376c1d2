"""From requests over pages to what AITER reads: one physical row per key, with running sums of rows and of keys.

AITER is always called with pages of one row, whatever the cache's page size is: larger pages have been silently wrong
in its releases. Everything is decided on the host from lengths; only block tables are read, and they on the device.

Axes: T new tokens (packed over requests), t rows of a call, n keys of a call, B requests, s sequences of a call.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mla.batch import AttentionBatch
from mla.cache import PagedLatentCache
from mla.checks import INT32_MAX
from mla.errors import bad

SENTINEL = -1  # a row number that no kernel may read: it fills what is left of a fixed buffer
STAND_IN = -1  # the owner of a sequence that no request has


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences of one call: sequence i has the next `query_lens[i]` rows and `kv_lens[i]` keys of `owners[i]`.

    Arrays (s,) int64. The rows are first .. first + sum(query_lens) - 1 of the batch, or `rows` (t,) where they do
    not lie side by side. An owner of -1 is a stand-in that pads a captured step: its rows are thrown away.
    """

    owners: np.ndarray
    query_lens: np.ndarray
    kv_lens: np.ndarray
    rows: np.ndarray

    @property
    def tokens(self) -> int:
        """Rows of the call."""
        return len(self.rows)

    @property
    def keys(self) -> int:
        """Keys of the call, counted once for each sequence."""
        return int(self.kv_lens.sum())

    def single_rows(self, causal: bool) -> "Sequences":
        """Return the same rows as sequences of one row: row i of q over s keys sees s - q + 1 + i of them, or all s."""
        q = self.query_lens
        place = np.arange(self.tokens) - np.repeat(np.cumsum(q) - q, q)
        kv_lens = np.repeat(self.kv_lens, q) - (np.repeat(q, q) - 1 - place if causal else 0)
        return Sequences(np.repeat(self.owners, q), np.ones_like(kv_lens), kv_lens, self.rows)


def sequences_of(batch: AttentionBatch, requests: list[int]) -> Sequences:
    """Return the sequences of some requests, without those that have no row or no key."""
    q, s = (np.array(x, np.int64) for x in (batch.query_lens_host, batch.seq_lens_host))
    starts = np.cumsum(q) - q
    chosen = np.array([b for b in requests if q[b] and s[b]], np.int64)
    rows = [np.arange(starts[b], starts[b] + q[b]) for b in chosen]
    return Sequences(chosen, q[chosen], s[chosen], np.concatenate([np.zeros(0, np.int64), *rows]))


def padded_sequences(batch: AttentionBatch, query_len: int) -> Sequences | str:
    """Return all rows of the batch as sequences of `query_len` rows, padding included, or a sentence why they are not.

    A captured step has a fixed number of rows. Those of no request, and those of requests without keys, become
    stand-ins over `query_len` keys, so that every sequence is as long as the kernel was captured for.
    """
    T = batch.num_tokens
    if T % query_len:
        return f"{T} rows are not a multiple of {query_len}, the query length of the captured step"
    lens = {q for q in batch.query_lens_host if q}
    if query_len > 1 and lens - {query_len}:
        return f"query_lens {sorted(lens)} are not all {query_len}, the query length of the captured step"
    if query_len == 1:
        single = sequences_of(batch, list(range(batch.num_requests))).single_rows(batch.mask == "causal")
        owners, kv_lens = np.full(T, STAND_IN), np.ones(T, np.int64)
        owners[single.rows], kv_lens[single.rows] = single.owners, single.kv_lens
        return Sequences(owners, np.ones(T, np.int64), kv_lens, np.arange(T))
    real = [(b, s) if s else (STAND_IN, query_len) for b, q, s in _requests(batch) if q]
    real += [(STAND_IN, query_len)] * (T // query_len - len(real))
    owners, kv_lens = np.array(real, np.int64).reshape(-1, 2).T
    return Sequences(owners, np.full(len(real), query_len), kv_lens, np.arange(T))


def _requests(batch: AttentionBatch) -> list[tuple[int, int, int]]:
    lens = zip(batch.query_lens_host, batch.seq_lens_host, strict=True)
    return [(b, q, s) for b, (q, s) in enumerate(lens)]


def running_sums(sequences: Sequences) -> tuple[np.ndarray, np.ndarray]:
    """Return the running sums of rows and of keys, (s + 1,) int32 both; raises ValueError past 2^31 keys."""
    if sequences.keys > INT32_MAX:
        fix = "send fewer or shorter requests a step"
        raise bad("batch", expected="fewer than 2^31 keys over all rows", got=f"{sequences.keys:,}", fix=fix)
    q, kv = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (sequences.query_lens, sequences.kv_lens))
    return q, kv


def slots_of_keys(block_table: Tensor, owners: Tensor, kv_indptr: Tensor, n: int, page_size: int) -> Tensor:
    """Return the cache slot of every key, (n,) int32; key j is in page block_table[owner, j // page_size].

    block_table (B, max_pages), owners (s,) int64, kv_indptr (s + 1,) int32 whose last entry is n. Keys of a stand-in
    are slot 0. Entries past a request's keys are never read. Waits for the device nowhere.
    """
    device = block_table.device
    if not block_table.numel():  # only stand-ins
        return torch.zeros(n, dtype=torch.int32, device=device)
    lens = kv_indptr[1:] - kv_indptr[:-1]
    sequence = torch.repeat_interleave(torch.arange(len(owners), device=device), lens, output_size=n)
    position = torch.arange(n, device=device) - kv_indptr[sequence]
    owner = owners[sequence]
    real = owner >= 0
    column = torch.where(real, position // page_size, 0)
    page = block_table[owner.clamp(min=0), column].to(torch.int64)
    return torch.where(real, page * page_size + position % page_size, 0).to(torch.int32)


def kernel_rows(cache: PagedLatentCache, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cache as AITER reads it, (rows, 1, 1, width) contiguous, and where each slot is in it, (n,) int32.

    `slots` (n,) int32 may hold the sentinel, which stays. Pages and rows that lie apart by multiples of a row's width,
    such as one layer of an engine's cache, are taken as they are. Others are gathered, which copies n rows. Waits for
    the device nowhere.
    """
    data, page, width = cache.data, cache.page_size, cache.data.shape[2]
    apart = data.stride(1) if page > 1 else width
    pages_apart = data.stride(0) if cache.num_pages > 1 else page * apart
    if pages_apart % width or apart % width:
        rows = cache.gather(slots.clamp(min=0).to(torch.int64))
        places = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
        return rows.view(-1, 1, 1, width), torch.where(slots < 0, slots, places)
    a, b = pages_apart // width, apart // width
    reach = (cache.num_pages - 1) * a + (page - 1) * b + 1
    view = data.as_strided((reach, 1, 1, width), (width, width, width, 1))
    if (a, b) == (page, 1):
        return view, slots
    return view, torch.where(slots < 0, slots, slots // page * a + slots % page * b)


def token_rows(cache: PagedLatentCache) -> tuple[Tensor, int]:
    """Return the cache as AITER's Triton decode reads it, (rows, 1, width) of any row stride, and a factor for pages.

    Page number p begins at row p * factor * page_size. A pool whose pages do not lie whole pages of rows apart is
    copied.
    """
    data, page = cache.data, cache.page_size
    width, apart = data.shape[2], data.stride(1) if page > 1 else data.stride(0)
    pages_apart = data.stride(0) if cache.num_pages > 1 else page * apart
    if pages_apart % (page * apart):
        return data.reshape(-1, 1, width), 1
    factor = pages_apart // (page * apart)
    reach = max(0, (cache.num_pages - 1) * factor * page + page)
    return data.as_strided((reach, 1, width), (apart, apart, 1)), factor
