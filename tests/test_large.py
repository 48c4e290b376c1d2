"""Suite `large`: offsets behind element 2^31. A pool of 4.3 GB costs little on a CPU where few pages are touched."""

import dataclasses
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from mla.adapters import from_attend
from mla.cache import CacheSpec, PagedLatentCache, slots_of
from mla.conformance import large as module
from mla.conformance.cases import DIMS, Case, find, sample_rows
from mla.conformance.guards import Wrong
from mla.conformance.large import (
    ROWS_BATCH,
    border_page,
    bytes_needed,
    far_check,
    far_fill,
    far_inputs,
    far_pages,
    far_seen,
    free_bytes,
    large,
    no_room,
    watched_pages,
)
from mla.conformance.runner import Result, summary
from mla.conformance.runner import run_case as run_and_diagnose
from mla.conformance.specs import spec
from mla.conformance.zoo import FAULTS
from mla.state import AttentionState

BORDER = 2**31
FAR = Case(spec("3q1s330"), DIMS["v3_n3"], "bf16", "", "needle_end", "shuffled", 64, cache="far")
WIDTH = 576
needs_room = pytest.mark.skipif(no_room(FAR) is not None, reason=f"suite large: {no_room(FAR)}")


def run_case(tier, case) -> Result:
    return run_and_diagnose(tier, case, diagnosed=False)


def reader(name, offsets):
    """A tier, right but for the element at which it looks for a row: offsets(slots (S,), width) -> (S, width)."""

    def attend(q, cache, batch, up, need):
        out, lse = AttentionState.empty(batch.num_tokens, need.N, need.V)
        query = torch.cat([torch.einsum("tnp,lnp->tnl", q.nope.float(), up.W_UK.float()), q.pe.float()], -1)
        flat, first = cache.data.reshape(-1), 0
        for b, (new, S) in enumerate(zip(batch.query_lens_host, batch.seq_lens_host, strict=True)):
            rows = flat[offsets(slots_of(batch.block_table[b], 0, S, batch.page_size), cache.data.shape[2])].float()
            for i in range(first, first + new):
                seen = rows[: int(batch.row_kv_lens[i])]
                scores = query[i] @ seen.T * need.softmax_scale
                latent = torch.softmax(scores, -1) @ seen[:, : need.L]
                out[i] = torch.einsum("nl,lnv->nv", latent, up.W_UV.float())
                lse[i] = torch.logsumexp(scores, -1)
            first += new
        return AttentionState(out, lse)

    return from_attend(name, attend)


def element(slots, width):
    return slots[:, None] * width + torch.arange(width)


def element_int32(slots, width):
    return element(slots.int(), width).long()  # torch's int32 product wraps as a kernel's does


OFFSETS = {
    # what overflows, and where a CPU index of that number looks
    "int32_from_the_end": element_int32,
    "int32_without_sign": lambda slots, width: element_int32(slots, width) & (BORDER - 1),
    "int32_bytes": lambda slots, width: (element(slots.int(), width) * 2).long() // 2,
    "page_base_int32": lambda slots, width: (
        (slots.int() // 64 * 64 * width)[:, None].long() + element(slots % 64, width)
    ),
    "slot_times_width_int32": lambda slots, width: (slots.int() * width)[:, None].long() + torch.arange(width),
}


@dataclasses.dataclass(frozen=True)
class Writer:
    """A right tier whose write counts elements in int32, and in `stray` mode also writes right."""

    inner: object
    stray: bool
    name: str = "writer"

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def write(self, cache, kv_c, k_pe, slot_mapping):
        keep = slot_mapping >= 0
        if self.stray:
            cache.write(kv_c, k_pe, slot_mapping)
        at = element_int32(slot_mapping[keep], cache.data.shape[2])
        if not self.stray or bool((at < 0).any()):
            cache.data.view(-1)[at] = torch.cat([kv_c, k_pe], -1)[keep].to(cache.data.dtype)


# Where the borders are


@pytest.mark.parametrize(("page_size", "page"), [(64, 58_254), (480, 7_767), (1, 3_728_270)])
def test_G1_the_border_lies_in_the_page_known_from_the_field_and_both_sides_are_owned(page_size, page):
    case = next(c for c in large() if c.cache == "far" and c.page_size == page_size)
    size = page_size * WIDTH
    assert (border_page(case), page * size < BORDER < (page + 1) * size) == (page, True)
    owned = {p for row in far_pages(case)[0] for p in row}
    assert {page, page + 1} <= owned


def test_G1_slots_3728270_and_3728271_are_owned_in_pages_of_64_rows():
    owned = far_inputs(FAR).owned_slots().tolist()
    assert 3_728_270 in owned
    assert 3_728_271 in owned
    assert 58_254 * 64 + 14 == 3_728_270


def test_G1_the_rows_case_has_rows_behind_the_border_of_an_absorbed_query():
    case = large()[-1]
    N, T = case.dims.N, case.batch.num_tokens
    assert (case.batch.name, N, T) == (ROWS_BATCH, 128, 29_696)
    first = next(t for t in range(T) if (t + 1) * N * WIDTH > BORDER)
    assert (first, T - first - 1) == (29_127, 568)
    rows, heads = sample_rows(case)
    assert sum(r > first for r in rows) >= 10
    assert 127 in heads


@pytest.mark.parametrize("case", [c for c in large() if c.cache == "far"], ids=lambda c: c.id)
def test_far_pages_belong_to_one_request_and_overflowed_offsets_come_out_on_decoys(case):
    tables, num_pages = far_pages(case)
    assert [len(row) for row in tables] == [-(-s // case.page_size) for s in case.batch.seq_lens]
    owned = [p for row in tables for p in row]
    assert max(Counter(owned).values()) == 1
    assert 0 <= min(owned) <= max(owned) < num_pages
    size, lowest = case.page_size * WIDTH, min(owned)
    for p in owned:
        for offset in (p * size, (p + 1) * size - 1):
            if offset >= BORDER:
                without_sign, from_the_end = offset - BORDER, num_pages * size + offset - 2 * BORDER
                assert 0 <= without_sign < lowest * size
                assert 0 <= from_the_end < lowest * size
    middle = border_page(case) // 2
    assert any(abs(p - middle) < len(owned) for p in owned), "int32 counts of bytes end there"


def test_large_cases_have_ids_of_their_own_that_are_found_again():
    cases = large()
    assert len({c.id for c in cases}) == len(cases)
    assert [find(c.id) for c in cases] == cases


# What is found


@needs_room
@pytest.mark.parametrize("case", [c for c in large() if c.cache == "far" and c.dims.N == 3], ids=lambda c: c.id)
def test_a_right_reader_passes(case):
    result = run_case(reader("right", element), case)
    assert (result.status, result.detail) == ("ok", "")


@needs_room
@pytest.mark.parametrize("name", OFFSETS)
def test_G1_a_reader_whose_offsets_overflow_is_rejected(name):
    result = run_case(reader(name, OFFSETS[name]), FAR)
    assert result.status in ("mismatch", "not_finite", "raised")


@needs_room
@pytest.mark.parametrize("case", [c for c in large() if c.page_size in (1, 480)], ids=lambda c: c.id)
def test_G1_overflow_is_found_in_pages_of_480_rows_and_of_one(case):
    assert run_case(reader("int32", element_int32), case).status in ("mismatch", "not_finite")


@needs_room
@pytest.mark.parametrize("fault", [f for f in FAULTS.values() if f.suite == "large"], ids=lambda f: f.name)
def test_planted_faults_that_only_large_can_show_are_shown(fault):
    found = [run_case(fault.tier(), case).status for case in large()[:3]]
    assert set(found) <= {"mismatch", "not_finite", "raised"}


@needs_room
def test_G1_overflow_hides_in_an_ordinary_pool():
    near = dataclasses.replace(FAR, cache="plain")
    assert run_case(reader("int32", element_int32), near).status == "ok"


@needs_room
@pytest.mark.parametrize(("stray", "sentence"), [(False, "is not what was written"), (True, "which no request owns")])
def test_G1_a_writer_whose_offsets_overflow_is_rejected(stray, sentence):
    given = far_inputs(FAR)
    cache = far_fill(Writer(from_attend("w", lambda *_: None), stray), FAR, given, "cpu")
    with pytest.raises(Wrong, match=sentence) as found:
        far_check(FAR, given, far_seen(cache, given))
    assert (found.value.status, found.value.kind) == ("mismatch", "write")
    right = far_fill(from_attend("w", lambda *_: None), FAR, given, "cpu")
    assert far_check(FAR, given, far_seen(right, given)) is None
    assert run_case(Writer(reader("w", element), stray), FAR).status != "ok"


@needs_room
def test_a_far_pool_holds_poison_in_slots_of_nobody_and_finite_decoys_below():
    given = far_inputs(FAR)
    cache = far_fill(from_attend("w", lambda *_: None), FAR, given, "cpu")
    watched, owned = watched_pages(given), given.owned_slots()
    assert bool(torch.isfinite(cache.data[: int(owned.min()) // 64]).all())
    above = int(watched[-1])
    assert above == int(owned.max()) // 64 + 1
    assert not bool(torch.isfinite(cache.data[above]).any())
    last = far_pages(FAR)[0][0][-1]
    assert 330 % 64 == 10
    assert bool(torch.isfinite(cache.data[last, :10]).all())
    assert not bool(torch.isfinite(cache.data[last, 10:]).any())


def test_a_pool_of_another_form_is_a_wrong_shape():
    inner = from_attend("w", lambda *_: None)
    small = SimpleNamespace(new_cache=lambda s: PagedLatentCache.new(CacheSpec(9, s.page_size, s.layout)), inner=inner)
    with pytest.raises(Wrong, match="new_cache gave") as found:
        far_fill(small, FAR, far_inputs(FAR), "cpu")
    assert (found.value.status, found.value.kind) == ("wrong_shape", "form")


# Room


def test_without_room_a_case_is_not_run_and_the_sentence_has_both_numbers(monkeypatch):
    monkeypatch.setattr(module, "free_bytes", lambda device: 10**9)
    result = run_case(reader("right", element), FAR)
    pool = far_pages(FAR)[1] * 64 * WIDTH * 2
    assert pool > 2 * BORDER
    assert (result.status, result.ok) == ("not_run", False)
    assert f"{10**9:,}" in result.detail
    assert f"{bytes_needed(FAR)['cpu']:,}" in result.detail
    assert bytes_needed(FAR)["cpu"] >= pool
    assert summary([result])["verdict"] != "ok"


def test_bytes_needed_counts_the_pool_on_the_device_and_the_noise_on_the_host():
    rows = large()[-1]
    T, N = 29_696, 128
    assert bytes_needed(rows, "cuda:0")["cpu"] == 16 * T * N * 192
    assert bytes_needed(rows, "cuda:0")["cuda:0"] > T * N * (192 + 576 + 128) * 2
    assert bytes_needed(FAR, "cuda:0")["cuda:0"] > 2 * BORDER
    assert bytes_needed(FAR, "cuda:0")["cpu"] < 2**20


def test_no_room_is_asked_of_every_device_and_small_cases_always_fit(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "free_bytes", lambda device: asked.append(device) or None)
    assert no_room(large()[-1], "cuda:0") is None
    assert asked == ["cpu", "cuda:0"]
    monkeypatch.setattr(module, "free_bytes", lambda device: 0)
    assert no_room(Case(spec("small_decode"))) is None
    assert "cuda:0 has 0 bytes free" in no_room(FAR, "cuda:0")


def test_free_bytes_of_this_machine_is_a_sensible_number():
    assert 2**20 < free_bytes("cpu") < 2**50
