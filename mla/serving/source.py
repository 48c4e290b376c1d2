"""Queries and latent rows of a replay, the same bits for the same token, however it is chunked.

Projections run over whole blocks of tokens, padded, so that no product's shape depends on the step or the request.
Axes: T new tokens, N heads, L KV rank, P nope, R rope.
"""

from collections import OrderedDict

import torch
from torch import Tensor

from mla.config import MLAConfig
from mla.projections import Query, project_latent, project_query
from mla.serving.hidden import HiddenSource
from mla.serving.traces import Request
from mla.weights import MLAWeights

GENERATED_BLOCK = 64


class TokenSource:
    """Projects the hidden states of any request's tokens with one layer's weights; remembers up to `cache_bytes`."""

    def __init__(
        self, config: MLAConfig, weights: MLAWeights, hidden: HiddenSource, cache_bytes: int = 1 << 29
    ) -> None:
        """Take the layer's config and weights, and the source of hidden states (T, H)."""
        self.config, self.weights, self.hidden, self.cache_bytes = config, weights, hidden, cache_bytes
        self._bytes = 0
        self._blocks: OrderedDict[tuple, tuple[Tensor, ...]] = OrderedDict()

    def tokens(self, request: Request, start: int, stop: int) -> tuple[Query, Tensor, Tensor]:
        """Return query, nope (n, N, P) and pe (n, N, R), kv_c (n, L) and k_pe (n, R) of positions start .. stop - 1."""
        parts = []
        while start < stop:
            first, end, key = self._place(request, start)
            block = self._block(request, first, end, key)
            count = min(end, stop) - start
            parts.append(tuple(x[start - first : start - first + count] for x in block))
            start += count
        q_nope, q_pe, kv_c, k_pe = (torch.cat(column) for column in zip(*parts, strict=True))
        return Query(q_nope, q_pe), kv_c, k_pe

    def rows(self, request: Request, stop: int) -> tuple[Tensor, Tensor]:
        """Return kv_c (stop, L) and k_pe (stop, R) of the first `stop` tokens."""
        _, kv_c, k_pe = self.tokens(request, 0, stop)
        return kv_c, k_pe

    def _place(self, request: Request, position: int) -> tuple[int, int, tuple]:
        """The block that holds a position: first, end (past the last token), and a name for what its tokens are."""
        prompt, size = request.input_length, request.block_size
        if position < prompt:
            k = position // size
            end = min((k + 1) * size, prompt)
            return k * size, end, ("prompt", k, request.block_ids[k], end - k * size)
        first = prompt + (position - prompt) // GENERATED_BLOCK * GENERATED_BLOCK
        end = min(first + GENERATED_BLOCK, prompt + request.output_length)
        return first, end, ("generated", request.id, first)

    def _block(self, request: Request, first: int, end: int, key: tuple) -> tuple[Tensor, ...]:
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return self._blocks[key]
        size = request.block_size if key[0] == "prompt" else GENERATED_BLOCK
        hidden = torch.zeros(size, self.config.H, dtype=self.hidden.dtype)
        hidden[: end - first] = self.hidden.tokens(request, first, end)
        positions = torch.arange(first, first + size)
        query = project_query(hidden, positions, self.weights, self.config)
        latent = project_latent(hidden, positions, self.weights, self.config)
        self._blocks[key] = tuple(x[: end - first] for x in (*query, *latent))
        self._bytes += _nbytes(self._blocks[key])
        while self._bytes > self.cache_bytes and len(self._blocks) > 1:
            self._bytes -= _nbytes(self._blocks.popitem(last=False)[1])
        return self._blocks[key]


def _nbytes(block: tuple[Tensor, ...]) -> int:
    return sum(x.untyped_storage().nbytes() for x in block)
