"""RoPE: frequencies against published implementations' numbers, and what rotation must preserve."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkrt.errors import LoadError
from sparkrt.ops.rope import attention_factor, inverse_frequencies, rope_inplace, rope_ref, rope_table

# From transformers 5.24 (float32): rotary_dim, arguments, attention factor, {pair: radians per position}.
GOLDENS: dict[str, tuple[int, dict[str, Any], float, dict[int, float]]] = {
    "linear": (
        128,
        {"theta": 1e4, "kind": "linear", "factor": 4.0},
        1.0,
        {0: 0.25, 1: 0.21649108827114105, 16: 0.02500000037252903, 32: 0.0024999999441206455, 63: 2.8869548259535804e-05},
    ),
    "llama3": (
        128,
        {"theta": 5e5, "kind": "llama3", "factor": 8.0, "original_max_position": 8192},
        1.0,
        {0: 1.0, 16: 0.03760603070259094, 32: 0.0005248460220173001, 48: 6.647869668086059e-06, 63: 3.068925877869333e-07},
    ),
    "yarn": (
        128,
        {"theta": 1e6, "kind": "yarn", "factor": 4.0, "original_max_position": 32768},
        1.138629436111989,
        {0: 1.0, 16: 0.03162277862429619, 32: 0.0006029411451891065, 48: 7.905693564680405e-06, 63: 3.102344408034696e-07},
    ),
    "yarn of a long hybrid": (
        64,
        {"theta": 1e7, "kind": "yarn", "factor": 4.0, "original_max_position": 262144},
        1.138629436111989,
        {0: 1.0, 8: 0.017782794311642647, 16: 0.00025693507632240653, 24: 1.405853367941745e-06, 31: 4.1370427084075345e-08},
    ),
    "yarn without truncation": (
        64,
        {"theta": 1.5e5, "kind": "yarn", "factor": 32.0, "original_max_position": 4096, "truncate": False},
        1.3465735902799727,
        {1: 0.6890442967414856, 8: 0.05081327259540558, 16: 0.0004564839182421565, 24: 4.099978468730114e-06},
    ),
    "yarn with mscale": (
        64,
        {"theta": 1e4, "kind": "yarn", "factor": 40.0, "original_max_position": 4096, "mscale": 1.0, "mscale_all_dim": 0.707},
        1.0857263992561355,
        {8: 0.10000000149011612, 16: 0.005500000435858965, 24: 2.499999936844688e-05, 31: 3.3338035336782923e-06},
    ),
    "yarn with a given factor": (
        64,
        {"theta": 1e4, "kind": "yarn", "factor": 4.0, "original_max_position": 4096, "attention_factor": 1.5},
        1.5,
        {8: 0.10000000149011612, 16: 0.006538461893796921, 24: 0.0002500000118743628, 31: 3.333803761051968e-05},
    ),
}
_SHARPNESS = ("attention_factor", "mscale", "mscale_all_dim")


@pytest.mark.parametrize("name", GOLDENS)
def test_frequencies_and_attention_factor_are_the_published_ones(name: str) -> None:
    rotary_dim, given_args, factor, golden = GOLDENS[name]
    frequencies = inverse_frequencies(rotary_dim=rotary_dim, **{k: v for k, v in given_args.items() if k not in _SHARPNESS})
    assert frequencies.dtype == np.float64
    assert frequencies.shape == (rotary_dim // 2,)
    np.testing.assert_allclose(frequencies[list(golden)], list(golden.values()), rtol=1e-6)
    sharpness = {k: v for k, v in given_args.items() if k in ("kind", "factor", *_SHARPNESS)}
    assert attention_factor(**sharpness) == pytest.approx(factor, rel=1e-12)


def test_default_frequencies_by_hand() -> None:
    assert inverse_frequencies(1e4, 8).tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001], rel=1e-14)
    assert attention_factor() == 1.0


def test_gguf_divisors_divide() -> None:
    divisors = (1.0, 2.0, 4.0, 8.0)
    assert inverse_frequencies(1e4, 8, freq_divisors=divisors).tolist() == pytest.approx([1.0, 0.05, 0.0025, 0.000125])


def test_gguf_divisors_are_llama3_scaling_in_another_form() -> None:
    """A converter stores plain/scaled; dividing by it must give the scaled frequencies back."""
    scaled = inverse_frequencies(5e5, 64, "llama3", 32.0, 8192)
    divisors = inverse_frequencies(5e5, 64) / scaled
    np.testing.assert_allclose(inverse_frequencies(5e5, 64, freq_divisors=divisors.tolist()), scaled, rtol=1e-14)


def test_table_is_cosines_then_sines_times_the_attention_factor() -> None:
    table = rope_table(inverse_frequencies(1e4, 8), 1.5, 100)
    assert table.shape == (100, 8)
    assert table.dtype == np.float32
    angles = np.array([99.0, 9.9, 0.99, 0.099])
    np.testing.assert_allclose(table[99], 1.5 * np.concatenate([np.cos(angles), np.sin(angles)]), atol=1e-6)
    np.testing.assert_array_equal(table[0], [1.5] * 4 + [0.0] * 4)


def test_multimodal_rope_with_text_positions_is_plain_rope() -> None:
    """Interleaved sections [t, h, w]: pair i takes height if i % 3 == 1, width if i % 3 == 2, within three times the section."""
    frequencies, sections, text = inverse_frequencies(1e7, 64), (11, 11, 10), (1234, 1234, 1234)
    axis = np.zeros(32, int)
    for which in (1, 2):
        axis[which : 3 * sections[which] : 3] = which
    assert np.bincount(axis).tolist() == list(sections)
    angle = np.array(text)[axis] * frequencies
    np.testing.assert_allclose(
        rope_table(frequencies, 1.0, 1235)[1234], np.concatenate([np.cos(angle), np.sin(angle)]), atol=1e-6
    )


def test_partial_rotation_leaves_the_rest_of_the_head_alone() -> None:
    x = np.random.default_rng(0).standard_normal((3, 2, 16))
    table = rope_table(inverse_frequencies(1e4, 4), 1.0, 8).astype(np.float64)
    y = rope_ref(x, np.array([0, 1, 7]), table)
    np.testing.assert_array_equal(y[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(y[0], x[0])
    one = x[2, 1, 0] * np.cos(7.0) - x[2, 1, 2] * np.sin(7.0)  # channel 0 pairs with channel R/2 = 2, at 1 radian a position
    assert y[2, 1, 0] == pytest.approx(one, abs=1e-6)


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500), st.integers(0, 2**32 - 1))
def test_scores_depend_on_position_differences_only(m: int, n: int, shift: int, seed: int) -> None:
    q, k = np.random.default_rng(seed).standard_normal((2, 1, 1, 32))
    frequencies = inverse_frequencies(1e4, 24)
    angle = np.arange(1001)[:, None] * frequencies
    table = np.concatenate([np.cos(angle), np.sin(angle)], axis=1)

    def score(at_q: int, at_k: int) -> float:
        return float(np.vdot(rope_ref(q, np.array([at_q]), table), rope_ref(k, np.array([at_k]), table)))

    assert score(m, n) == pytest.approx(score(m + shift, n + shift), abs=1e-9)


@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_in_place_rotation_is_the_reference(seed: int, tokens: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, 3, 16)).astype(np.float32)
    positions = rng.integers(0, 64, tokens).astype(np.int32)
    table = rope_table(inverse_frequencies(1e4, 8), 1.2, 64)
    want = rope_ref(x.astype(np.float64), positions, table.astype(np.float64))
    rope_inplace(x, positions, table)
    np.testing.assert_allclose(x, want, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kind": "longrope"}, ("longrope", "yarn")),
        ({"kind": "yarn", "factor": 4.0}, ("yarn", "original_max_position_embeddings")),
        ({"kind": "llama3", "original_max_position": 8192, "factor": 0.0}, ("llama3", "factor")),
        ({"rotary_dim": 7}, ("7", "even")),
        ({"freq_divisors": (1.0, 2.0)}, ("2", "4")),
    ],
)
def test_bad_settings_are_named(arguments: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(LoadError) as error:
        inverse_frequencies(**({"theta": 1e4, "rotary_dim": 8} | arguments))
    assert all(word in str(error.value) for word in words)
