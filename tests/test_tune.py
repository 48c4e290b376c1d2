"""Which form a request takes: measured tables, interpolation, the rule without a table, and files that are not."""

import math

import pytest
import torch

from mla.cache import FloatRows
from mla.conformance.cases import TOY
from mla.need import Need
from mla.tune import FormCosts, FormTable, counted_work, measure

V3 = dict(N=128, L=512, P=128, R=64, V=128)


def make_need(dtype: torch.dtype = torch.float32, **sizes: int) -> Need:
    sizes = {**V3, **sizes}
    layout = FloatRows(sizes["L"], sizes["R"], dtype)
    return Need(**sizes, softmax_scale=0.1, layout=layout, page_size=64, dtype=dtype)


def table(**changes) -> FormTable:
    fields = dict(
        size=(128, 512, 128, 64, 128), dtype="float32", query_lens=(1, 16, 256), contexts=(1, 1024),
        mha=((1.0, 9.0), (2.0, 8.0), (4.0, 8.0)), mqa=((1.0, 1.0), (2.0, 2.0), (16.0, 32.0)), provenance="by hand",
    )  # fmt: skip
    return FormTable(**(fields | changes))


def test_the_table_is_interpolated_in_logarithms_and_constant_beyond_its_edge():
    t = table()
    assert t.log_ratio(1, 1024) == pytest.approx(math.log(9))
    assert t.log_ratio(16, 1024) == pytest.approx(math.log(4))
    assert t.log_ratio(4, 1024) == pytest.approx((math.log(9) + math.log(4)) / 2)  # 4 is half-way from 1 to 16
    assert t.log_ratio(16, 32) == pytest.approx(math.log(4) / 2)  # 32 is half-way from 1 to 1024
    assert t.log_ratio(10_000, 1 << 20) == t.log_ratio(256, 1024) == pytest.approx(math.log(1 / 4))


def test_a_table_decides_for_its_size_and_dtype_only():
    costs = FormCosts((table(),), "measured")
    assert costs.form(make_need(), 1, 1025) == "mqa"
    assert costs.form(make_need(), 256, 1280) == "mha"
    flipped = FormCosts((table(mha=table().mqa, mqa=table().mha),), "measured")
    assert flipped.form(make_need(), 256, 1280) == "mqa"
    assert flipped.form(make_need(N=64), 256, 1280) == FormCosts().form(make_need(N=64), 256, 1280)
    assert flipped.form(make_need(torch.bfloat16), 256, 1280) == FormCosts().form(make_need(torch.bfloat16), 256, 1280)


def test_without_a_table_decode_is_absorbed_and_a_long_prompt_expanded():
    costs = FormCosts()
    assert "default" in costs.provenance
    for seen in (1, 64, 4096, 131072):
        assert costs.form(make_need(), 1, seen) == "mqa"
    assert costs.form(make_need(), 2048, 2048) == "mha"
    assert costs.form(make_need(), 2048, 65536) == "mha"
    assert costs.form(make_need(), 0, 0) == "mqa"


def test_counted_work_without_extras_breaks_even_at_the_flop_count(monkeypatch):
    """FLOPs alone: q (2 (2 L + R) - 2 (P + R + V)) pairs = S 2 L (P + V): 171 query tokens for V3 (long contexts)."""
    monkeypatch.setattr("mla.tune.EXPAND_EXTRA", 0.0)
    monkeypatch.setattr("mla.tune.SCORE_EXTRA", 0.0)
    size, S = tuple(V3.values()), 10_000_000
    cheaper = lambda q: "mha" if counted_work(*size, q, S)[0] < counted_work(*size, q, S)[1] else "mqa"
    assert (cheaper(170), cheaper(171)) == ("mqa", "mha")


def test_a_file_of_tables_comes_back_and_anything_else_is_refused_by_name(tmp_path):
    costs = FormCosts((table(),), "here")
    costs.save(tmp_path / "deep" / "tune.json")
    back = FormCosts.load(tmp_path / "deep" / "tune.json")
    assert back.tables == costs.tables
    assert "by hand" in back.provenance
    for text in ("", "{}", '{"tables": [{"size": 1}]}', "[1]"):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match=r"bad\.json"):
            FormCosts.load(tmp_path / "bad.json")
    with pytest.raises(ValueError, match=r"missing\.json"):
        FormCosts.load(tmp_path / "missing.json")


def test_measure_times_every_pair_of_both_forms():
    import tiers

    seen: list[tuple[int, int]] = []
    made = measure(
        tiers.get("paged", form="mha"), tiers.get("paged", form="mqa"), TOY, "f32", "test",
        query_lens=(1, 3), contexts=(1, 40, 70), repeats=1, progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert seen == [(i, 6) for i in range(1, 7)]
    assert (made.size, made.dtype) == ((3, 32, 12, 8, 10), "float32")
    assert all(len(row) == 3 and min(row) > 0 for form in (made.mha, made.mqa) for row in form)
    assert len(made.mha) == len(made.mqa) == 2
