"""The batches that every tier must get right: shapes known in the field, page edges, and rows that see nothing.

Host lists only. seq_lens count all keys of a request, query_lens its new tokens (packed to T over the requests).
"""

from dataclasses import dataclass
from itertools import permutations

from mla.batch import parse_batch
from mla.errors import bad


@dataclass(frozen=True)
class BatchSpec:
    """One step by its lengths: what is new, what is cached, and what is unusual about it.

    `page_size` is the page of a layout that is about its edges, else the usual one. `mask` is the one of Need;
    `row_kv_lens` gives the bounds for "rows". `unwritten` lists rows whose slot is -1 because their keys are in the
    cache already; `pad_tokens` rows at the end belong to no request.
    """

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    page_size: int = 16
    mask: str = "causal"
    row_kv_lens: tuple[int, ...] | None = None
    unwritten: tuple[int, ...] = ()
    pad_tokens: int = 0
    edge: bool = False

    @property
    def num_tokens(self) -> int:
        """T: rows of the step, padding included."""
        return sum(self.query_lens) + self.pad_tokens

    def visible(self) -> list[int]:
        """Return the number of keys that each of the sum(query_lens) rows sees."""
        if self.row_kv_lens is not None:
            return list(self.row_kv_lens)
        full = self.mask == "full"
        pairs = zip(self.query_lens, self.seq_lens, strict=True)
        return [0 if s == 0 else s if full else s - q + i + 1 for q, s in pairs for i in range(q)]


def spec(name: str) -> BatchSpec:
    """Return a batch by its name in `SPECS` or `BESIDE`, or one written in the batch grammar, such as 16q1s4k.

    Raises ValueError for a text that is neither.
    """
    known = SPECS.get(name) or BESIDE.get(name)
    if known is not None:
        return known
    try:
        query_lens, seq_lens = parse_batch(name)
    except ValueError as error:
        fix = "see mla.conformance.specs.SPECS"
        raise bad("batch", expected="a known name or COUNTqNEWsKEYS", got=repr(name), fix=fix) from error
    return BatchSpec(name, tuple(query_lens), tuple(seq_lens))


def page_edges(page: int) -> list[BatchSpec]:
    """Return the layouts around a page of `page` rows: prefixes and new tokens that end before, on and after it."""
    half = page // 2
    layouts = {
        "edge_fill": ([0], [page]),
        "edge_around": ([0, 0, 0], [page - 1, page, page + 1]),
        "edge_after_page": ([page], [2]),
        "edge_halves": ([half], [half]),
        "edge_across": ([page - 1], [2]),
        "edge_mixed": ([0, half, page], [page - 1, half, 1]),
        "edge_decode": ([page - 2, page - 1, page], [1, 1, 1]),
        "edge_decode_half": ([half - 1], [1]),
    }
    return [_edge(f"{name}_{page}", prefix, new, page) for name, (prefix, new) in layouts.items()]


def edge_lengths(page: int) -> BatchSpec:
    """Return a decode over each of 0, 1, page - 1, page and page + 1 keys and a fresh prompt of each length."""
    lengths = tuple(sorted({0, 1, page - 1, page, page + 1}))
    return BatchSpec(f"edge_lengths_{page}", (1,) * len(lengths) + lengths, lengths * 2, page, edge=True)


def orders(parts: dict[str, tuple[int, int]]) -> dict[str, BatchSpec]:
    """Return one batch for every order of some requests; `parts` names each by a letter, (query_len, seq_len)."""
    made = {}
    for letters in permutations(parts):
        query_lens, seq_lens = zip(*(parts[letter] for letter in letters), strict=True)
        name = f"order_{''.join(letters)}"
        made[name] = BatchSpec(name, query_lens, seq_lens)
    return made


def _edge(name: str, prefix: list[int], new: list[int], page: int) -> BatchSpec:
    seq_lens = tuple(p + n for p, n in zip(prefix, new, strict=True))
    return BatchSpec(name, tuple(new), seq_lens, page, edge=True)


FIELD = [
    BatchSpec("small_decode", (1, 1), (32, 40)),
    BatchSpec("small_prefill", (8, 8), (32, 40)),
    BatchSpec("mixed_small", (1, 1, 5, 5), (32, 40, 48, 56)),
    BatchSpec("medium_decode", (1,) * 8, (128, 256, 512, 1024) * 2),
    BatchSpec("medium_prefill", (16,) * 4, (256, 512, 1024, 2048)),
    BatchSpec("mixed_medium", (1, 1, 1, 7, 7, 7), (512, 1024, 2048) * 2),
    BatchSpec("large_decode", (1,) * 32, (2048,) * 32),
    BatchSpec("large_prefill", (32,) * 8, (4096,) * 8),
    BatchSpec("single_decode", (1,), (1024,)),
    BatchSpec("single_prefill", (64,), (1024,)),
    BatchSpec("spec_decode_small", (4,) * 4, (128, 256, 512, 1024)),
    BatchSpec("spec_decode_medium", (8,) * 6, (512, 1024, 2048) * 2),
    BatchSpec("chunked_context_prefill", (32, 8, 8, 16, 16, 8), (1568, 520, 8, 80, 96, 8)),
]

EDGES = [
    _edge("edge_tiny_1", [2, 4], [3, 1], 1),
    *page_edges(16),
    _edge("edge_across_32", [31], [2], 32),
    *page_edges(64),
    *page_edges(128),
    *(edge_lengths(page) for page in (1, 8, 16, 32, 64, 128)),
]

FEW_KEYS = [
    BatchSpec("one_key", (1,) * 4, (1,) * 4),
    BatchSpec("two_keys", (1, 2), (1, 2)),
    BatchSpec("verify_2", (2, 2, 2), (2, 33, 61)),
    BatchSpec("verify_4", (4, 4, 4), (4, 33, 61)),
    BatchSpec("verify_8", (8, 8, 8), (8, 33, 61)),
    BatchSpec("query_17", (17, 1, 17), (17, 50, 71)),
]

EMPTY_ROWS = [
    BatchSpec("no_requests", (), ()),
    BatchSpec("only_padding", (), (), pad_tokens=3),
    BatchSpec("no_new_tokens", (0, 1, 0), (20, 21, 0)),
    BatchSpec("zero_contexts", (3, 5, 2, 1), (67, 5, 66, 1)),
    BatchSpec("zero_rows", (1, 1, 1, 1), (64, 0, 64, 0)),
    BatchSpec("zero_rows_prefill", (9, 4, 9, 2), (64, 0, 64, 0)),
    BatchSpec("all_rows_empty", (1, 3), (0, 0)),
    BatchSpec(
        "rank_without_keys",
        (1, 3, 9),
        (0, 20, 0),
        mask="rows",
        row_kv_lens=(0, 18, 19, 19, *[0] * 9),
        unwritten=tuple(range(13)),
    ),
    BatchSpec(
        "rank_some_rows", (4, 2), (3, 17), mask="rows", row_kv_lens=(0, 1, 1, 3, 16, 17), unwritten=tuple(range(6))
    ),
    BatchSpec("slot_minus_one", (4, 1, 6), (36, 20, 6), unwritten=(0, 1, 4, 5, 6)),
    BatchSpec("nothing_written", (3, 2), (35, 2), unwritten=(0, 1, 2, 3, 4)),
    BatchSpec("padded_tail", (1, 3, 2), (17, 33, 40), pad_tokens=6),
    BatchSpec("padded_requests", (3, 3, 3, 0), (17, 33, 40, 0), pad_tokens=3),
]

MIXED = [
    BatchSpec("mixed_prefill_first", (19, 2, 1, 2), (19, 34, 40, 66)),
    BatchSpec("mixed_prefill_last", (1, 2, 2, 19), (40, 34, 66, 19)),
    BatchSpec("mixed_prefill_between", (1, 19, 2, 1, 12), (40, 35, 34, 9, 60)),
    BatchSpec("full_mask", (5, 1, 7), (20, 33, 7), mask="full"),
]

# a decode, a verification, a fresh prompt and a chunk of one; whoever sorts requests by length must sort them back
ORDERS = orders({"d": (1, 33), "v": (2, 18), "p": (17, 17), "c": (5, 40)})

# the last row of a request sees fewer keys than the first
FALLING = BatchSpec("falling_bounds", (3, 2), (20, 11), 3, mask="rows", row_kv_lens=(17, 5, 9, 11, 4))

# More requests than a GPU has processors: some do two in a row, and what is true of the first is not of the second
PAIRS = BatchSpec("long_short_pairs", (1, 7) * 70, (300, 196) * 70)

SPECS: dict[str, BatchSpec] = {s.name: s for s in (*FIELD, *EDGES, *FEW_KEYS, *EMPTY_ROWS, *MIXED)}
# known by name too, but not paired with everything else
BESIDE: dict[str, BatchSpec] = {**ORDERS, FALLING.name: FALLING, PAIRS.name: PAIRS}
