"""The paged latent cache: what a slot holds, engine tensors adopted in place, and writes that must change nothing."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla.batch import AttentionBatch
from mla.cache import CacheSpec, FloatRows, PagedLatentCache, slots_of
from mla.memory import LiveStorages

L, R, PAGE = 6, 2, 4
NAN = float("nan")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def poisoned(pages: int = 5, page: int = PAGE, dtype: torch.dtype = torch.float32, R: int = R) -> PagedLatentCache:
    cache = PagedLatentCache.new(CacheSpec(pages, page, FloatRows(L, R, dtype)))
    cache.data.fill_(NAN)
    return cache


def rows(n: int, seed: int = 0, dtype: torch.dtype = torch.float32, R: int = R) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n, width, generator=random, dtype=torch.float64).to(dtype) for width in (L, R))


def written(cache: PagedLatentCache) -> list[int]:
    """The slots that hold something else than poison."""
    flat = cache.data.reshape(-1, cache.data.shape[2])
    return [slot for slot, row in enumerate(flat) if not bool(row.isnan().all())]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_and_widths_of_a_row(dtype):
    layout = FloatRows(512, 64, dtype)
    assert (layout.storage_width, layout.storage_dtype) == (576, dtype)
    assert layout.row_bytes == 576 * dtype.itemsize  # 1152 in 16 bits
    assert layout.name == {8: "float64", 4: "float32"}.get(dtype.itemsize, str(dtype)[6:])
    assert PagedLatentCache.new(CacheSpec(3, 16, layout)).data.shape == (3, 16, 576)


def test_layouts_are_hashable_values():
    assert FloatRows(L, R) == FloatRows(L, R, torch.bfloat16)
    assert len({FloatRows(L, R), FloatRows(L, R, torch.bfloat16), FloatRows(L, R, torch.float16)}) == 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_a_slot_gives_back_the_row_rounded_once_to_the_layout(dtype, source):
    cache, (kv_c, k_pe) = poisoned(dtype=dtype), rows(3, dtype=source)
    slots = torch.tensor([17, 0, 6])
    cache.write(kv_c, k_pe, slots)
    got = cache.read(slots)
    for a, b, c in zip(got, cache.layout.round_trip(kv_c, k_pe), (kv_c, k_pe), strict=True):
        assert a.dtype == dtype
        assert torch.equal(a, b)
        assert torch.equal(a, c.to(dtype))
    assert written(cache) == [0, 6, 17]


def test_latent_and_rope_may_come_in_different_dtypes():
    cache, (kv_c, k_pe) = poisoned(dtype=torch.bfloat16), rows(2)
    cache.write(kv_c.to(torch.bfloat16), k_pe.to(torch.float16), torch.tensor([1, 2]))
    assert torch.equal(cache.read(torch.tensor([1, 2]))[1], k_pe.to(torch.float16).to(torch.bfloat16))


def test_a_row_is_the_latent_and_then_the_rope_part():
    cache, (kv_c, k_pe) = poisoned(), rows(1)
    cache.write(kv_c, k_pe, torch.tensor([9]))
    assert torch.equal(cache.data[2, 1], torch.cat([kv_c[0], k_pe[0]]))


def test_A14_a_prefill_is_written_once():
    cache = poisoned()
    batch = AttentionBatch.bottom_right([7], [7], [[3, 1]], page_size=PAGE, num_pages=5)
    cache.write(*rows(7), batch.slot_mapping)
    assert written(cache) == [4, 5, 6, 12, 13, 14, 15]


def test_slot_minus_one_is_not_written():
    cache, (kv_c, k_pe) = poisoned(), rows(4)
    cache.write(kv_c, k_pe, torch.tensor([-1, 5, -1, 2]))
    assert written(cache) == [2, 5]
    assert torch.equal(cache.read(torch.tensor([5, 2]))[0], kv_c[[1, 3]])


def test_rows_past_the_last_slot_are_ignored():
    cache, (kv_c, k_pe) = poisoned(), rows(6)
    kv_c[2:], k_pe[2:] = NAN, NAN  # rows of a padded graph
    cache.write(kv_c, k_pe, torch.tensor([3, 19]))
    assert written(cache) == [3, 19]
    assert torch.equal(cache.read(torch.tensor([3, 19]))[1], k_pe[:2])


@pytest.mark.parametrize("slots", [[], [-1, -1]])
def test_nothing_to_write(slots):
    cache = poisoned()
    cache.write(*rows(2), torch.tensor(slots, dtype=torch.int64))
    assert written(cache) == []
    assert PagedLatentCache.new(CacheSpec(0, PAGE, FloatRows(L, R))).num_pages == 0


def test_without_a_rope_part():
    cache, (kv_c, k_pe) = poisoned(R=0), rows(2, R=0)
    cache.write(kv_c, k_pe, torch.tensor([1, 4]))
    assert [x.shape for x in cache.read(torch.tensor([4, 1]))] == [(2, L), (2, 0)]
    assert torch.equal(cache.read(torch.tensor([4, 1]))[0], kv_c.flip(0))


def bad_writes():
    kv_c, k_pe = rows(2)
    slots = torch.tensor([1, 2])
    yield kv_c, k_pe, torch.tensor([1, 20]), ValueError, r"slot_mapping: expected -1 \.\. 19, got 20"
    yield kv_c, k_pe, torch.tensor([-2, 1]), ValueError, r"slot_mapping: expected -1 \.\. 19, got -2"
    yield kv_c, k_pe, slots.int(), TypeError, r"slot_mapping: expected torch.int64 of shape \(T,\), got torch.int32"
    yield kv_c, k_pe, slots[:, None], TypeError, r"slot_mapping: .* of shape \(2, 1\)"
    yield kv_c, k_pe, slots.to("meta"), ValueError, "slot_mapping: expected device cpu, got meta"
    yield kv_c[:1], k_pe, slots, ValueError, r"kv_c: expected \(>= 2, 6\), got \(1, 6\)"
    yield kv_c[:, 1:], k_pe, slots, ValueError, r"kv_c: expected \(>= 2, 6\), got \(2, 5\)"
    yield k_pe, kv_c, slots, ValueError, r"kv_c: expected \(>= 2, 6\), got \(2, 2\)"
    yield kv_c, k_pe[None], slots, ValueError, r"k_pe: expected \(>= 2, 2\), got \(1, 2, 2\)"
    yield kv_c.int(), k_pe, slots, TypeError, "kv_c: expected one of .*, got torch.int32"
    yield kv_c, k_pe.to(torch.float8_e4m3fn), slots, TypeError, "k_pe: .*got torch.float8_e4m3fn"
    yield kv_c.to("meta"), k_pe, slots, ValueError, "kv_c: expected device cpu, got meta"


@pytest.mark.parametrize(("kv_c", "k_pe", "slots", "kind", "text"), list(bad_writes()))
def test_a_refused_write_names_the_argument_and_writes_nothing(kv_c, k_pe, slots, kind, text):
    cache = poisoned()
    with pytest.raises(kind, match=text):
        cache.write(kv_c, k_pe, slots)
    assert written(cache) == []


@pytest.mark.parametrize("page", [1, 3, 8, 16, 48, 64, 128])
def test_H6_every_page_size_gives_back_the_same_rows(page):
    n = 131
    pages = -(-n // page)
    table = torch.randperm(pages + 2, generator=torch.Generator().manual_seed(page))[:pages].int()
    cache, (kv_c, k_pe) = poisoned(pages + 2, page), rows(n)
    cache.write(kv_c, k_pe, slots_of(table, 0, n, page))
    for start, stop in ((0, n), (5, 5), (page // 2, n - 1)):  # a start inside a page too
        got = cache.read(slots_of(table, start, stop, page))
        assert torch.equal(got[0], kv_c[start:stop])
        assert torch.equal(got[1], k_pe[start:stop])
    assert len(written(cache)) == n


@given(st.permutations(range(5)), st.integers(1, 20))
def test_where_the_pages_lie_does_not_matter(pages, n):
    cache, (kv_c, k_pe) = poisoned(), rows(n)
    slots = slots_of(torch.tensor(pages, dtype=torch.int32), 0, n, PAGE)
    cache.write(kv_c, k_pe, slots)
    assert torch.equal(cache.read(slots)[0], kv_c)
    assert torch.equal(cache.read(slots)[1], k_pe)
    assert written(cache) == sorted(slots.tolist())


def engine_views():
    """The same pages (5, 4, L+R) as one layer of three, cut from tensors that engines allocate."""
    yield "layers first", lambda: torch.full((3, 5, PAGE, L + R), NAN), lambda x: x[1]
    yield "pages first", lambda: torch.full((5, 3, PAGE, L + R), NAN), lambda x: x[:, 1]
    yield "rows padded", lambda: torch.full((5, PAGE, L + R + 3), NAN), lambda x: x[..., : L + R]
    yield (
        "pages padded",
        lambda: torch.full((5, PAGE * (L + R) + 5), NAN),
        lambda x: x[:, : PAGE * (L + R)].unflatten(1, (PAGE, -1)),
    )
    yield "rows before pages", lambda: torch.full((PAGE, 5, L + R), NAN), lambda x: x.transpose(0, 1)  # fmt: skip


@pytest.mark.parametrize(("make", "cut"), [v[1:] for v in engine_views()], ids=[v[0] for v in engine_views()])
def test_an_engine_tensor_is_adopted_without_a_copy(make, cut):
    whole = make()
    cache, (kv_c, k_pe) = PagedLatentCache.wrap(cut(whole), FloatRows(L, R, torch.float32)), rows(6)
    slots = torch.tensor([19, 0, 7, -1, 4, 11])
    cache.write(kv_c, k_pe, slots)
    keep = slots >= 0
    assert (cache.num_pages, cache.page_size) == (5, PAGE)
    assert written(cache) == [0, 4, 7, 11, 19]
    assert int((~whole.isnan()).sum()) == 5 * (L + R)  # nothing outside of the view
    row = torch.cat([kv_c[keep], k_pe[keep]], dim=1)
    assert torch.equal(cache.gather(slots[keep]), row)
    target = torch.full((8, L + R), 7.0)
    assert cache.gather(slots[keep], target).data_ptr() == target.data_ptr()
    assert torch.equal(target[:5], row)
    assert bool((target[5:] == 7).all())
    cache.copy_page(1, 2)  # page 1 has slots 4 and 7, page 2 had slot 11
    assert written(cache) == [0, 4, 7, 8, 11, 19]
    assert torch.equal(cache.gather(torch.tensor([8, 11])), cache.gather(torch.tensor([4, 7])))
    assert torch.equal(cache.gather(slots[keep][:-1]), row[:-1])


def test_gather_into_a_buffer_holds_the_rows_once():
    # a second copy of the rows would double the workspace of a tier over an engine's pages
    data = torch.zeros(300, 3, PAGE, L + R)[:, 1]
    cache, slots = PagedLatentCache.wrap(data, FloatRows(L, R, torch.float32)), torch.arange(1200)
    target = torch.empty(1200, L + R)
    with LiveStorages() as storages:
        cache.gather(slots, target)
    assert storages.peak < target.nbytes


def bad_tensors():
    good = torch.zeros(5, PAGE, L + R)
    yield good[0], ValueError, r"tensor: expected \(pages, page_size, 8\), got \(4, 8\)"
    yield good[..., 1:], ValueError, r"tensor: expected \(pages, page_size, 8\), got \(5, 4, 7\)"
    yield good[:, :0], ValueError, r"tensor: expected \(pages, page_size, 8\), got \(5, 0, 8\)"
    yield good.double(), TypeError, "tensor: expected torch.float32, got torch.float64"
    yield torch.zeros(5, L + R, PAGE).transpose(1, 2), ValueError, "tensor: expected rows contiguous in memory"
    yield good[:1].expand(5, PAGE, L + R), ValueError, "tensor: expected rows that share no memory"
    yield good[:, :1].expand(5, PAGE, L + R), ValueError, "tensor: expected rows that share no memory"
    yield good.as_strided((4, PAGE, L + R), (L + R, L + R, 1)), ValueError, "tensor: expected rows that share no memory"


@pytest.mark.parametrize(("tensor", "kind", "text"), list(bad_tensors()))
def test_wrap_names_what_does_not_fit(tensor, kind, text):
    with pytest.raises(kind, match=text):
        PagedLatentCache.wrap(tensor, FloatRows(L, R, torch.float32))


@pytest.mark.parametrize(("source", "target"), [(5, 0), (0, 5), (-1, 0), (0, -1)])
def test_copy_page_stays_in_the_pool(source, target):
    with pytest.raises(ValueError, match=r"^(source|target): expected a page in 0 \.\. 4, got (5|-1)"):
        poisoned().copy_page(source, target)


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: FloatRows(0, 2), ValueError, r"layout\.L: expected an int >= 1, got 0"),
        (lambda: FloatRows(6, -1), ValueError, r"layout\.R: expected an int >= 0, got -1"),
        (lambda: FloatRows(6, 2, torch.int8), TypeError, r"layout\.dtype: expected one of .*, got torch.int8"),
        (lambda: CacheSpec(-1, 4, FloatRows(6, 2)), ValueError, "pages: expected an int >= 0, got -1"),
        (lambda: CacheSpec(1, 0, FloatRows(6, 2)), ValueError, "page_size: expected an int >= 1, got 0"),
        (lambda: CacheSpec(1, True, FloatRows(6, 2)), TypeError, "page_size: expected an int >= 1, got True"),
    ],
)
def test_bad_sizes_are_named(make, kind, text):
    with pytest.raises(kind, match=text):
        make()


def test_slots_of_a_range_of_positions():
    table = torch.tensor([7, 2, 5], dtype=torch.int32)
    assert slots_of(table, 2, 9, 4).tolist() == [30, 31, 8, 9, 10, 11, 20]
    assert slots_of(table, 0, 0, 4).tolist() == []
    assert slots_of(table, 0, 9, 4).dtype == torch.int64
    every = [slots_of(table, i, i + 1, 4).item() for i in range(12)]
    assert every == [page * 4 + i for page, i in itertools.product([7, 2, 5], range(4))]


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ((4, 4, None), TypeError, "layout: expected a cache layout, got None"),
        ((4, 4, FloatRows(8, 4), "nowhere"), ValueError, "device: expected a device of this machine, got 'nowhere'"),
        ((4, 0, FloatRows(8, 4)), ValueError, "page_size: expected an int >= 1, got 0"),
    ],
)
def test_a_spec_that_fits_nothing_names_the_field(fields, kind, text):
    with pytest.raises(kind, match=f"^{text}"):
        CacheSpec(*fields)
