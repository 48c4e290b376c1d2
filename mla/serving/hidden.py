"""Hidden states for a replay: made up, but the same for the same token, whoever asks and in whichever order.

H hidden.
"""

from collections import OrderedDict
from hashlib import blake2b

import torch
from torch import Tensor

from mla.errors import bad
from mla.serving.traces import Request

_GENERATED_BLOCK = 16


class HiddenSource:
    """Standard normal hidden states, a pure function of (seed, block id, offset) or (seed, request, position).

    Prompt tokens depend on their block id alone, so equal prefixes really are equal; generated tokens depend on the
    request id and the position. `hidden_size` is H, `dtype` that of the rows (drawn in float32, then rounded);
    `cache_bytes` bounds the blocks that are remembered. Raises ValueError for sizes below 1 and a dtype that is not
    floating.
    """

    def __init__(
        self, hidden_size: int, seed: int = 0, dtype: torch.dtype = torch.float32, cache_bytes: int = 1 << 26
    ) -> None:
        for name, value in (("hidden_size", hidden_size), ("cache_bytes", cache_bytes)):
            if type(value) is not int or value < 1:
                raise bad(name, expected="an int of at least 1", got=repr(value), fix=f"pass {name}=1 or more")
        if not dtype.is_floating_point:
            raise bad("dtype", expected="a floating dtype", got=str(dtype), fix="pass torch.float32 or torch.bfloat16")
        self.hidden_size, self.seed, self.dtype, self.cache_bytes = hidden_size, seed, dtype, cache_bytes
        self._blocks: OrderedDict[tuple[object, int], Tensor] = OrderedDict()
        self._bytes = 0

    def tokens(self, request: Request, start: int, stop: int) -> Tensor:
        """Return the hidden states (stop - start, H) of positions start .. stop - 1 of prompt and answer.

        dtype is that of the source. Raises ValueError unless 0 <= start <= stop <= input_length + output_length.
        """
        end = request.input_length + request.output_length
        if not 0 <= start <= stop <= end:
            raise bad(
                "start, stop",
                expected=f"0 <= start <= stop <= {end}, the tokens of request {request.id}",
                got=f"{start}, {stop}",
                fix="ask for positions of the prompt or of the generated tokens",
            )
        pieces = [torch.empty(0, self.hidden_size, dtype=self.dtype)]
        while start < stop:
            inside = start < request.input_length
            size = request.block_size if inside else _GENERATED_BLOCK
            k, offset = divmod(start if inside else start - request.input_length, size)
            count = min(size - offset, (min(stop, request.input_length) if inside else stop) - start)
            key = ("prompt", request.block_ids[k]) if inside else ("generated", request.id, k)
            pieces.append(self._block(key, size)[offset : offset + count])
            start += count
        return torch.cat(pieces)

    def _block(self, key: object, rows: int) -> Tensor:
        """(rows, H). A block is always drawn whole, so that a row does not depend on how many were asked for."""
        if (key, rows) in self._blocks:
            self._blocks.move_to_end((key, rows))
            return self._blocks[key, rows]
        digest = blake2b(repr((self.seed, key)).encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        block = torch.randn(rows, self.hidden_size, generator=generator, dtype=torch.float32).to(self.dtype)
        self._blocks[key, rows] = block
        self._bytes += block.nbytes
        while self._bytes > self.cache_bytes and len(self._blocks) > 1:
            self._bytes -= self._blocks.popitem(last=False)[1].nbytes
        return block
