"""What a layer may ask for: hashing, the device's normal form, features that are never dropped, packages too old."""

import dataclasses
import importlib.metadata
import re

import numpy as np
import pytest
import torch
from small_case import SCALE, L, R, make_need

from mla.cache import FloatRows
from mla.need import Capacity, Need, arch_of, normal_device, refuse_features, refuse_package

FEATURES = {
    "window": 4,
    "sinks": True,
    "softcap": 30.0,
    "alibi": True,
    "kv_sharing": True,
    "output_quantisation": "float8_e4m3fn",
}


def test_a_need_is_a_frozen_value():
    assert make_need() == make_need()
    assert len({make_need(), make_need(), make_need(lse=False), make_need(capacity=Capacity(1, 2, 3, 4))}) == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_need().N = 4


@pytest.mark.parametrize(("a", "b"), [("cuda", "cuda:0"), ("cpu", "cpu:0"), ("meta", torch.device("meta"))])
def test_devices_are_equal_with_and_without_index(a, b):
    assert make_need(device=a) == make_need(device=b)
    assert hash(make_need(device=a)) == hash(make_need(device=b))


def test_devices_with_other_indices_differ():
    assert make_need(device="cuda:1") != make_need(device="cuda:0")
    assert [normal_device(d) for d in ("cpu", "cpu:0", "cuda", "cuda:3")] == ["cpu", "cpu", "cuda:0", "cuda:3"]


def test_defaults_that_follow_from_other_fields():
    need = make_need(dtype=torch.bfloat16)
    assert (need.out_dtype, need.compute_dtype, need.device, need.arch) == (torch.bfloat16, torch.float32, "cpu", "cpu")
    assert make_need(dtype=torch.float64).compute_dtype == torch.float64
    assert make_need(out_dtype=torch.float32, dtype=torch.float16).out_dtype == torch.float32
    assert make_need(arch="sm_90").arch == "sm_90"
    assert arch_of("meta") == "meta"


def test_the_softmax_scale_is_required():
    with pytest.raises(TypeError, match="softmax_scale"):
        Need(N=3, L=L, P=12, R=R, V=10, layout=FloatRows(L, R), page_size=4, dtype=torch.float32)


BAD = [
    ({"softmax_scale": 1}, TypeError, "softmax_scale: expected a positive Python float, got 1"),
    ({"softmax_scale": torch.tensor(0.1)}, TypeError, "softmax_scale: expected a positive Python float"),
    ({"softmax_scale": None}, TypeError, "softmax_scale: expected a positive Python float, got None"),
    ({"softmax_scale": 0.0}, ValueError, "softmax_scale: expected a positive Python float, got 0.0"),
    ({"softmax_scale": float("nan")}, ValueError, "softmax_scale: expected a positive Python float, got nan"),
    ({"N": 0}, ValueError, "N: expected an int >= 1, got 0"),
    ({"P": 0}, ValueError, "P: expected an int >= 1, got 0"),
    ({"V": 0}, ValueError, "V: expected an int >= 1, got 0"),
    ({"R": -1, "layout": FloatRows(L, R)}, ValueError, "R: expected an int >= 0, got -1"),
    ({"N": 3.0}, TypeError, "N: expected an int >= 1, got 3.0"),
    ({"page_size": True}, TypeError, "page_size: expected an int >= 1, got True"),
    ({"mask": "casual"}, ValueError, "mask: expected one of ('causal', 'full', 'rows'), got 'casual'"),
    ({"layout": FloatRows(L, R + 1)}, ValueError, f"layout: expected a layout of L={L}, R={R}"),
    ({"layout": None}, ValueError, f"layout: expected a layout of L={L}, R={R}, got None"),
    ({"dtype": torch.int8, "layout": FloatRows(L, R)}, TypeError, "dtype: expected one of "),
    ({"dtype": "bfloat16", "layout": FloatRows(L, R)}, TypeError, "dtype: expected one of "),
    ({"out_dtype": torch.float8_e4m3fn}, TypeError, "out_dtype: expected one of "),
    ({"device": "gpu"}, ValueError, "device: expected a torch device, got 'gpu'"),
    ({"lse": 1}, TypeError, "lse: expected True or False, got 1"),
    ({"sinks": None}, TypeError, "sinks: expected True or False, got None"),
    ({"window": 0}, ValueError, "window: expected an int >= 1, got 0"),
    ({"window": 4.0}, TypeError, "window: expected an int >= 1, got 4.0"),
    ({"softcap": 0.0}, ValueError, "softcap: expected a positive Python float, got 0.0"),
    ({"output_quantisation": True}, TypeError, "output_quantisation: expected a name or None, got True"),
    ({"capacity": 64}, TypeError, "capacity: expected a Capacity or None, got 64"),
]


@pytest.mark.parametrize(("fields", "kind", "text"), BAD, ids=[f"{text[:50]}" for _, _, text in BAD])
def test_bad_fields_are_named(fields, kind, text):
    with pytest.raises(kind, match=f"^{re.escape(text)}.*Fix: "):
        make_need(**fields)


def test_a_numpy_float_is_a_python_float():
    assert make_need(softmax_scale=np.float64(SCALE)) == make_need()


@pytest.mark.parametrize("field", ["max_requests", "max_tokens", "max_query_len", "max_seq_len", "max_splits"])
@pytest.mark.parametrize(("value", "kind"), [(0, ValueError), (1.5, TypeError)])
def test_capacities_are_counts(field, value, kind):
    with pytest.raises(kind, match=f"^capacity.{field}: expected an int >= 1"):
        dataclasses.replace(Capacity(1, 2, 3, 4), **{field: value})


def test_T1_every_feature_is_listed_and_refused_in_a_sentence():
    assert make_need().features() == {}
    assert refuse_features("mine", make_need()) == []
    need = make_need(**FEATURES)
    assert need.features() == FEATURES
    sentences = refuse_features("mine", need)
    assert len(sentences) == len(FEATURES)
    for sentence, (name, value) in zip(sentences, FEATURES.items(), strict=True):
        assert sentence.startswith(f"{name} = {value!r} is not computed by mine")
        assert sentence.endswith("unset it or choose another tier.")
    assert len(refuse_features("mine", need, supported=("window", "sinks"))) == len(FEATURES) - 2


def test_every_field_that_is_a_feature_is_covered():
    # a new field of Need has to be put on one side or the other
    plain = {"N", "L", "P", "R", "V", "softmax_scale", "layout", "page_size", "dtype", "device", "arch", "out_dtype"}
    plain |= {"lse", "mask", "uniform_queries", "graph_capture", "batch_invariant", "capacity"}
    assert {f.name for f in dataclasses.fields(Need)} - plain == set(FEATURES)


@pytest.mark.parametrize(
    ("found", "minimum", "fits"),
    [
        ("0.6.18", "0.6.18", True),
        ("0.6.18.post1", "0.6.18", True),
        ("0.10.0", "0.9.9", True),
        ("1.0", "1.0.0", True),
        ("1", "1.0", True),
        ("2.13.0+cpu", "2.11", True),
        ("0.1.7.post2.dev18", "0.1.7", True),
        ("0.6.17", "0.6.18", False),
        ("0.9.10", "0.10", False),
        ("1.0", "1.0.1", False),
        ("unknown", "0.1", False),
    ],
)
def test_T6_a_package_too_old_is_named_with_both_versions(monkeypatch, found, minimum, fits):
    monkeypatch.setattr("mla.need.version", lambda name: found)
    expected = (
        f"flashinfer-python {found} is too old; fast needs flashinfer-python >= {minimum};"
        ' run pip install "mla-tiers[flashinfer]" or choose another tier.'
    )
    assert refuse_package("fast", "flashinfer-python", minimum, "flashinfer") == ([] if fits else [expected])


def test_T6_a_missing_package_is_named():
    expected = (
        "no-such-package is not installed; fast needs no-such-package >= 1.2;"
        ' run pip install "mla-tiers[fast]" or choose another tier.'
    )
    assert refuse_package("fast", "no-such-package", "1.2", "fast") == [expected]
    assert refuse_package("fast", "pytest", importlib.metadata.version("pytest"), "test") == []
