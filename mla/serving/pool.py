"""Pages of the cache: who holds them, which prefixes they keep, and which may be used again.

Every page is exactly one of free, cached (no holder, keeps a prefix, may be evicted) or referenced. The pool only does
the book-keeping; it never touches a row. A step of the caller is: `begin_step`, then any calls, then the copies are
carried out in order, then the rows are written, then rows are read. Pages whose rows this step writes must stay held
until the calls of the step are over.
"""

import sys
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mla.errors import bad
from mla.serving.traces import BlockId

Key = tuple[int, int]  # (number of the chain of block ids, tokens)


class OutOfPages(RuntimeError):
    """Every page is referenced: the caller must wait for a release or preempt a holder; nothing was changed."""


@dataclass(frozen=True)
class Prefix:
    """The names of the prefixes of one prompt: within one pool, equal names are equal tokens.

    `chain[k]` numbers the block ids 0 .. k, so the first n tokens are named `(chain[ceil(n / block_size) - 1], n)`:
    right for any page size, whether or not it divides the block size.
    """

    chain: tuple[int, ...]
    block_size: int
    length: int

    def key(self, tokens: int) -> Key:
        """Return the name of the first `tokens` tokens (1 .. length)."""
        return self.chain[(tokens - 1) // self.block_size], tokens

    def ends(self, start: int, stop: int, page_size: int) -> Iterator[int]:
        """Yield the prefix lengths in start + 1 .. stop that others can share: ends of pages, blocks and prompt."""
        stop = min(stop, self.length)
        if start >= stop:
            return
        marks = {m for size in (page_size, self.block_size) for m in range(start - start % size + size, stop + 1, size)}
        if stop == self.length:
            marks.add(stop)
        yield from sorted(marks)


class PagePool:
    """Hand out `num_pages` pages of `page_size` rows (None: as many as are asked for), sharing equal prefixes.

    `evictions` and `copies` count events; `peak_pages` is the most pages referenced at once. Raises ValueError for
    sizes below 1.
    """

    def __init__(self, num_pages: int | None, page_size: int) -> None:
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if (type(value) is not int or value < 1) and not (name == "num_pages" and value is None):
                raise bad(name, expected="an int of at least 1", got=repr(value), fix=f"pass {name}=64")
        self.num_pages, self.page_size = num_pages, page_size
        self.evictions = self.copies = self.peak_pages = 0
        self._refs: list[int] = []  # holders of each page handed out so far
        self._keys: list[list[Key]] = []  # the prefixes that end in each page, shortest first
        self._index: dict[Key, int] = {}
        self._free: list[int] = []
        self._cached: OrderedDict[int, None] = OrderedDict()  # next to be evicted first
        self._fresh: set[Key] = set()  # named in this step: not yet written when the copies run
        self._chains: dict[tuple[object, BlockId], int] = {}

    @property
    def created(self) -> int:
        """Pages that were ever handed out: ids are below this, so a cache of an unlimited pool needs this many."""
        return len(self._refs)

    @property
    def referenced(self) -> int:
        """Pages that somebody holds now."""
        return len(self._refs) - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Pages that `allocate` could hand out now, evicting cached ones if it must."""
        return (sys.maxsize if self.num_pages is None else self.num_pages) - self.referenced

    def pages_for(self, tokens: int) -> int:
        """Return ceil(tokens / page_size)."""
        return -(-tokens // self.page_size)

    def begin_step(self) -> None:
        """Say that the rows of the last step are written, so that their pages may be copied from now on."""
        self._fresh.clear()

    def prefix(self, block_ids: Sequence[BlockId], block_size: int, length: int) -> Prefix:
        """Return the names of the prefixes of a prompt of `length` tokens in blocks of `block_size`."""
        chain: list[int] = []
        last: object = ("blocks of", block_size)
        for block in block_ids:
            last = self._chains.setdefault((last, block), len(self._chains))
            chain.append(last)
        return Prefix(tuple(chain), block_size, length)

    def match(self, prefix: Prefix, wanted: int) -> tuple[list[int], int]:
        """Return the pages of the longest prefix that is kept, and its length in tokens; holders are unchanged.

        All pages but the last are full. `wanted` is how many tokens the caller will have: if it writes into the last
        page this step, that page has to be copied first, so a page of this very step (not yet written) will not do.
        """
        size, pages, hit = self.page_size, [], 0
        while hit + size <= prefix.length and (page := self._index.get(prefix.key(hit + size))) is not None:
            pages.append(page)
            hit += size
        for tokens in range(min(hit + size - 1, prefix.length), hit, -1):
            key = prefix.key(tokens)
            if key in self._index and (tokens == wanted or key not in self._fresh):
                return [*pages, self._index[key]], tokens
        return pages, hit

    def unreferenced(self, pages: Iterable[int]) -> int:
        """Return how many of these pages nobody holds: acquiring them lowers `available` by as many."""
        return sum(self._refs[page] == 0 for page in pages)

    def acquire(self, pages: Sequence[int]) -> None:
        """Add one holder to each page; raises ValueError, with nothing changed, if one is free or unknown."""
        for page in pages:
            if not (0 <= page < self.created and (self._refs[page] or page in self._cached)):
                raise bad("pages", expected="referenced or cached pages", got=f"page {page}", fix="allocate it first")
        for page in pages:
            self._refs[page] += 1
            self._cached.pop(page, None)
        self.peak_pages = max(self.peak_pages, self.referenced)

    def release(self, pages: Sequence[int]) -> None:
        """Take one holder from each page, last page first, so that tails are evicted before the heads they need.

        Raises ValueError, with nothing changed, if a page has no holder left: a double free.
        """
        for page, take in Counter(pages).items():
            have = self._refs[page] if 0 <= page < self.created else 0
            if have < take:
                raise bad("pages", expected=f"{take} holders of page {page}", got=str(have), fix="release it only once")
        for page in reversed(pages):
            self._refs[page] -= 1
            if self._refs[page] == 0 and self._keys[page]:
                self._cached[page] = None
            elif self._refs[page] == 0:
                self._free.append(page)

    def allocate(self) -> int:
        """Return a page with one holder and no prefix: a free one, else a new one, else the oldest cached one.

        Raises OutOfPages, with nothing changed, when every page is referenced.
        """
        if self._free:
            page = self._free.pop()
        elif self.num_pages is None or self.created < self.num_pages:
            page = self.created
            self._refs.append(0)
            self._keys.append([])
        elif self._cached:
            page = self._cached.popitem(last=False)[0]
            for key in self._keys[page]:
                del self._index[key]
            self._keys[page] = []
            self.evictions += 1
        else:
            raise OutOfPages(f"all {self.num_pages} pages of {self.page_size} rows are referenced")
        self._refs[page] = 1
        self.peak_pages = max(self.peak_pages, self.referenced)
        return page

    def writable(self, page: int, position: int) -> int:
        """Return the page in which the holder of `page` may write `position` and later ones: the page or a copy.

        A page is copied when it has another holder or keeps a longer prefix than `position` tokens. A result other
        than `page` means: copy page -> result before the writes of this step; the caller holds the result and no
        longer the page. Raises OutOfPages, with nothing changed.
        """
        if self._refs[page] == 1 and all(tokens <= position for _, tokens in self._keys[page]):
            return page
        if self._refs[page] > 1 and not self.available:
            raise OutOfPages(f"page {page} is shared and all {self.num_pages} pages are referenced, so it stays as is")
        # Released first: the last page of a full pool then comes back as its own copy. If it is evicted instead and
        # given to someone else, no harm is done: copies run before writes.
        self.release([page])
        result = self.allocate()
        self.copies += result != page
        return result

    def remember(self, prefix: Prefix, table: Sequence[int] | np.ndarray, start: int, stop: int) -> None:
        """Keep the prefixes that end in tokens start + 1 .. stop, which this step writes to the pages of `table`."""
        for tokens in prefix.ends(start, stop, self.page_size):
            key, page = prefix.key(tokens), int(table[(tokens - 1) // self.page_size])
            if key not in self._index:
                self._index[key] = page
                self._keys[page].append(key)
                self._fresh.add(key)

    def check(self, tables: Iterable[Sequence[int]] = ()) -> None:
        """Raise RuntimeError unless each page is free, cached or referenced as often as `tables` hold it."""
        held = [0] * self.created
        for table in tables:
            for page in table:
                held[page] += 1
        free, cached = set(self._free), set(self._cached)
        kept = [key for keys in self._keys for key in keys]
        faults = [
            (held != self._refs, f"tables hold {held}, the pool counts {self._refs}"),
            (len(free) != len(self._free), "a page is free twice"),
            (bool(free & cached), f"pages {free & cached} are both free and cached"),
            (any(bool(refs) == (p in free or p in cached) for p, refs in enumerate(held)), "a page is lost or reused"),
            (any(self._keys[p] for p in free), "a free page keeps a prefix"),
            (any(not self._keys[p] for p in cached), "a cached page keeps no prefix"),
            (any(self._index.get(k) != p for p, keys in enumerate(self._keys) for k in keys), "a stale prefix"),
            (len(kept) != len(self._index), "a prefix without its page"),
            (self.num_pages is not None and self.created > self.num_pages, "more pages than there are"),
        ]
        wrong = [text for fault, text in faults if fault]
        if wrong:
            raise RuntimeError("page pool: " + "; ".join(wrong))
