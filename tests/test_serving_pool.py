"""The page pool: reference counts, prefix sharing at any page size, copy-on-write, eviction, and its complaints."""

from collections.abc import Callable

import pytest

from mla.serving import OutOfPages, PagePool, Prefix


def fill(pool: PagePool, prefix: Prefix, stop: int | None = None) -> list[int]:
    """Write a prompt as one step of a request would: the pages it then holds."""
    stop = prefix.length if stop is None else stop
    table = [pool.allocate() for _ in range(pool.pages_for(stop))]
    pool.remember(prefix, table, 0, stop)
    pool.begin_step()
    return table


def test_prefix_names_are_equal_exactly_for_equal_tokens() -> None:
    pool = PagePool(None, 3)
    a, b = pool.prefix((1, 2, 3), 4, 11), pool.prefix((1, 2, 5), 4, 12)
    assert [a.key(n) == b.key(n) for n in (1, 4, 8, 9, 11)] == [True, True, True, False, False]
    assert pool.prefix((2, 2), 4, 8).key(8) != a.key(8)  # the same last block after another first one
    assert pool.prefix((1, 2), 5, 8).key(8) != a.key(8)  # the same ids of another block size


def test_prefix_ends() -> None:
    prefix = PagePool(None, 3).prefix((1, 2, 3), 4, 11)
    assert list(prefix.ends(0, 11, 3)) == [3, 4, 6, 8, 9, 11]
    assert list(prefix.ends(4, 9, 3)) == [6, 8, 9]
    assert list(prefix.ends(9, 20, 3)) == [11]
    assert list(prefix.ends(11, 20, 3)) == []


def test_full_pages_and_partial_tail_are_shared() -> None:
    pool = PagePool(8, 4)
    prompt = pool.prefix(("a", "b"), 8, 10)
    table = fill(pool, prompt)
    assert pool.match(prompt, 10) == (table, 10)
    pool.acquire(table)
    assert (pool.referenced, pool.available) == (3, 5)
    longer = pool.prefix(("a", "c"), 8, 16)
    assert pool.match(longer, 16) == (table[:2], 8)
    pool.check([table, table])


@pytest.mark.parametrize("page_size", [1, 3, 5, 16])
def test_two_prompts_share_to_the_end_of_their_last_equal_block(page_size: int) -> None:
    pool = PagePool(None, page_size)
    table = fill(pool, pool.prefix((1, 2, 3), 4, 12))
    pages, hit = pool.match(pool.prefix((1, 2, 9, 9), 4, 16), 16)
    assert (pages, hit) == (table[: pool.pages_for(8)], 8)


def test_a_page_of_this_step_is_read_but_not_copied() -> None:
    pool = PagePool(None, 4)
    prompt = pool.prefix((1,), 8, 6)
    table = [pool.allocate(), pool.allocate()]
    pool.remember(prompt, table, 0, 6)
    assert pool.match(prompt, 6) == (table, 6)  # a full hit reads the tail in place
    assert pool.match(prompt, 7) == (table[:1], 4)  # one that has more to write would copy what is not there yet
    pool.begin_step()
    assert pool.match(prompt, 7) == (table, 6)


def test_a_shared_tail_is_copied_on_write() -> None:
    pool = PagePool(8, 4)
    prompt = pool.prefix((1,), 8, 6)
    table = fill(pool, prompt)
    assert pool.writable(table[1], 6) == table[1]  # one holder, nothing kept beyond position 6
    pool.acquire(table)
    mine = pool.writable(table[1], 6)
    assert mine not in table
    assert pool.copies == 1
    pool.check([table, [table[0], mine]])
    assert pool.writable(table[1], 6) == table[1]  # the other one is alone again
    assert pool.match(prompt, 7) == (table, 6)


def test_a_longer_prefix_in_the_page_is_not_overwritten() -> None:
    pool = PagePool(4, 8)
    long = pool.prefix((1, 2), 4, 8)
    (page,) = fill(pool, long)
    pool.release([page])
    short = pool.prefix((1, 3), 4, 8)
    assert pool.match(short, 8) == ([page], 4)
    pool.acquire([page])
    mine = pool.writable(page, 4)
    assert mine != page
    assert pool.match(long, 9) == ([page], 8)
    pool.check([[mine]])


def test_the_last_page_of_a_full_pool_is_taken_over() -> None:
    pool = PagePool(1, 8)
    long, short = pool.prefix((1, 2), 4, 8), pool.prefix((1, 3), 4, 8)
    (page,) = fill(pool, long)
    pool.release([page])
    pool.acquire([page])
    assert pool.writable(page, 4) == page
    assert (pool.copies, pool.match(long, 9), pool.match(short, 9)) == (0, ([], 0), ([], 0))
    pool.check([[page]])


def test_writable_without_a_page_changes_nothing() -> None:
    pool = PagePool(1, 4)
    prompt = pool.prefix((1,), 4, 3)
    table = fill(pool, prompt)
    pool.acquire(table)
    with pytest.raises(OutOfPages, match="page 0 is shared and all 1 pages are referenced"):
        pool.writable(0, 3)
    pool.check([table, table])


def test_release_keeps_prefix_pages_and_frees_the_others() -> None:
    pool = PagePool(4, 4)
    prompt = pool.prefix((1,), 4, 4)
    table = [*fill(pool, prompt), pool.allocate()]
    pool.release(table)
    assert (pool.referenced, pool.available) == (0, 4)
    assert pool.match(prompt, 4) == (table[:1], 4)
    assert pool.allocate() == table[1]  # the free page goes first
    pool.check([[table[1]]])


def test_eviction_takes_the_longest_unused_prefix_and_its_tail_first() -> None:
    pool = PagePool(4, 4)
    old, new = pool.prefix((1, 2), 4, 8), pool.prefix((3, 4), 4, 8)
    first, second = fill(pool, old), fill(pool, new)
    pool.release(first)
    pool.release(second)
    pool.acquire(first[:1])  # used again: now the youngest
    pool.release(first[:1])
    assert [pool.allocate() for _ in range(4)] == [first[1], second[1], second[0], first[0]]
    assert pool.evictions == 4
    assert pool.match(old, 8) == ([], 0)


def test_out_of_pages_changes_nothing() -> None:
    pool = PagePool(2, 4)
    held = [pool.allocate(), pool.allocate()]
    with pytest.raises(OutOfPages, match="all 2 pages of 4 rows are referenced"):
        pool.allocate()
    pool.check([held])
    pool.release(held[:1])
    assert pool.allocate() == held[0]


def test_an_unlimited_pool_grows_and_never_evicts() -> None:
    pool = PagePool(None, 4)
    for k in range(50):
        pool.release(fill(pool, pool.prefix((k,), 4, 4)))
    assert (pool.created, pool.evictions, pool.peak_pages) == (50, 0, 1)


@pytest.mark.parametrize("pages", [[0, 0], [0, 1], [7], [-1]])
def test_double_free_raises_and_changes_nothing(pages: list[int]) -> None:
    pool = PagePool(4, 4)
    held = [pool.allocate(), pool.allocate()]
    pool.release(held[1:])
    with pytest.raises(ValueError, match=r"pages: expected . holders of page .*Fix: release it only once"):
        pool.release(pages)
    pool.check([held[:1]])


@pytest.mark.parametrize("page", [1, 9, -1])
def test_a_free_page_cannot_be_shared(page: int) -> None:
    pool = PagePool(4, 4)
    held = [pool.allocate(), pool.allocate()]
    pool.release(held[1:])
    with pytest.raises(ValueError, match=f"got page {page}"):
        pool.acquire([0, page])
    pool.check([held[:1]])


@pytest.mark.parametrize(("pages", "size"), [(0, 4), (-1, 4), (4, 0), (4, None), (2.0, 4), (True, 4)])
def test_pool_sizes(pages: int, size: int) -> None:
    with pytest.raises(ValueError, match=r"num_pages|page_size"):
        PagePool(pages, size)


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._refs.__setitem__(0, 2),
        lambda pool: pool._free.append(0),
        lambda pool: pool._free.append(pool._free[0]),
        lambda pool: pool._free.clear(),
        lambda pool: pool._cached.clear(),
        lambda pool: pool._keys[1].clear(),
        lambda pool: pool._index.clear(),
        lambda pool: setattr(pool, "num_pages", 2),
    ],
)
def test_check_finds_damage(damage: Callable[[PagePool], None]) -> None:
    pool = PagePool(4, 4)
    held = [pool.allocate()]
    cached, free = fill(pool, pool.prefix((1,), 4, 4)), [pool.allocate()]
    pool.release([*cached, *free])
    pool.check([held])
    damage(pool)
    with pytest.raises(RuntimeError, match="page pool: "):
        pool.check([held])
