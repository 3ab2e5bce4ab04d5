"""The golden gradient against derivatives that know nothing of it, and against what a gradient must be.

The derivatives are complex steps: the operation as nested loops over complex numbers, the imaginary part of
one element 10⁻³⁰ or, with 50 digits, 10⁻⁴⁰. No number is subtracted from another nearly equal one, so a
derivative is as accurate as the operation itself; and no backward pass is involved.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import ml_dtypes
import mpmath
import numpy as np
import numpy.typing as npt
import pytest
from mpmath import mp
from test_reference import Case, normal_tensors, random_case

from iha_core import (
    GRADIENTS,
    PROFILES,
    ArgumentTypeError,
    AttentionConfig,
    DTypeError,
    IHAError,
    ShapeError,
    attention,
    attention_vjp,
)
from iha_core.config import Causal, Rope
from iha_core.gradient import backward, forward

Array = npt.NDArray[Any]
Gradients = Mapping[str, Array]
Number = Any
"""A complex number of mpmath, or a complex array with one trial for each element that is stepped."""

CAUSAL: tuple[Causal, ...] = ("virtual", "token", "none")
ROPE: tuple[Rope, ...] = ("virtual", "token", "none")
STEP, DIGITS = 1e-30, 50
PRECISE_STEP = mp.mpf(10) ** -40

SIZES: Mapping[str, Mapping[str, int]] = {
    "plain": {"B": 2, "N": 4, "M": 5, "H": 3, "G": 1, "P": 2, "d": 6, "e": 7},
    "N < M, G > H": {"B": 1, "N": 4, "M": 5, "H": 3, "G": 7, "P": 2, "d": 6, "e": 8},
    "N > M, G < H": {"B": 1, "N": 6, "M": 5, "H": 4, "G": 2, "P": 3, "d": 8, "e": 7},
    "N = M": {"B": 2, "N": 4, "M": 4, "H": 3, "G": 5, "P": 2, "d": 6, "e": 1},
    "batch": {"B": 3, "N": 2, "M": 4, "H": 2, "G": 3, "P": 2, "d": 4, "e": 5},
}
"""Sizes that differ wherever two axes could be taken for each other."""


# The operation over complex numbers


@cache
def turn(position: int, i: int, d: int, theta: float) -> tuple[Any, Any]:
    """Cosine and sine of the angle of lane pair i, (6), with 50 digits."""
    with mpmath.workdps(DIGITS):
        angle = position * mp.mpf(theta) ** (-mp.mpf(2 * i) / d)
        return mp.cos(angle), mp.sin(angle)


class Loops:
    """The operation from SPEC.md chapter 3, element by element; hidden keys are skipped.

    Args:
        x: the seven arrays; an element is a `Number`.
        config: the configuration.
        exp: of a `Number`.
        real: makes of a real number one that a `Number` can be multiplied by.
        indices: masks, ids, positions and query_offset, as of `attention`.
    """

    def __init__(
        self,
        x: Mapping[str, Array],
        config: AttentionConfig,
        exp: Callable[[Number], Number],
        real: Callable[[Any], Any],
        **indices: Any,
    ) -> None:
        self.x, self.config, self.exp, self.real, self.indices = x, config, exp, real, indices
        self.B, self.N, self.H, self.d = x["q"].shape[:4]
        self.M, self.G, self.e = x["v"].shape[1:4]
        self.P = x["alpha_q"].shape[2]
        with mpmath.workdps(DIGITS):
            self.scale = real(1 / mp.sqrt(self.d) if config.scale is None else mp.mpf(config.scale))
        offset = indices.get("query_offset")
        given = np.asarray(self.M - self.N if offset is None else offset, np.int64)
        self.offsets = np.broadcast_to(given, (self.B,)).tolist()

    def of_keys(self, name: str) -> Array | None:
        """Segment ids or positions of the keys: those of the queries where these stand alone."""
        found: Array | None = self.indices.get(f"kv_{name}")
        return self.indices.get(name) if found is None else found

    def loss(self, cotangent: Array) -> Number:
        """sum(cotangent * output), (11) and (12)."""
        total: Number = self.real(mp.mpf(0))
        R = self.x["collapse"]
        per_head = R.ndim < self.x["alpha_q"].ndim
        for b in range(self.B):
            rows = [self.rows(b, h) for h in range(self.H)]
            for n, i, p in itertools.product(range(self.N), range(self.H), range(self.P)):
                for h in (i,) if per_head else range(self.H):
                    factor = R[i, p] if per_head else R[i, h, p]
                    for j, element in enumerate(rows[h][n * self.P + p]):
                        total = total + self.real(cotangent[b, n, i, j]) * factor * element
        return total

    def rows(self, b: int, h: int) -> list[list[Number]]:
        """Virtual outputs of one batch element and head, (7) to (10); nothing for a row that sees nothing."""
        queries = self.rotated(self.mixed("q", b, h), self.places(b, "q"))
        keys = self.rotated(self.mixed("k", b, h), self.places(b, "k"))
        values = self.mixed("v", b, h)
        rows = []
        for t, query in enumerate(queries):
            seen = [s for s in range(self.M * self.P) if self.is_visible(b, t, s)]
            weights = [self.scale * sum(x * y for x, y in zip(query, keys[s], strict=True)) for s in seen]
            if self.config.normalisation == "softmax" and seen:  # [SOFT-2]
                powers = [self.exp(logit) for logit in weights]
                denominator = sum(powers)
                weights = [power / denominator for power in powers]
            chosen = [values[s] for s in seen]
            lanes = zip(*chosen, strict=True)
            rows.append([sum(a * x for a, x in zip(weights, lane, strict=True)) for lane in lanes])
        return rows

    def mixed(self, name: str, b: int, h: int) -> list[list[Number]]:
        """(1) to (4)."""
        x, alpha = self.x[name], self.x[f"alpha_{name}"]
        return [
            [sum(alpha[g, h, p] * x[b, n, g, j] for g in range(x.shape[2])) for j in range(x.shape[3])]
            for n in range(x.shape[1])
            for p in range(self.P)
        ]

    def places(self, b: int, side: str) -> list[int]:
        """RoPE positions of all virtual tokens, [POS-1] to [POS-3]."""
        positions = self.indices.get("positions") if side == "q" else self.of_keys("positions")
        if positions is not None:
            tokens = positions[b].tolist()
        else:
            tokens = [self.offsets[b] + n for n in range(self.N)] if side == "q" else list(range(self.M))
        virtual = self.config.rope == "virtual"
        return [token * self.P + p if virtual else token for token in tokens for p in range(self.P)]

    def rotated(self, vectors: list[list[Number]], places: list[int]) -> list[list[Number]]:
        """(6)."""
        if self.config.rope == "none":
            return vectors
        rotated = [list(vector) for vector in vectors]
        for old, new, place in zip(vectors, rotated, places, strict=True):
            for i in range(self.d // 2):
                half = self.config.rope_pairing == "half"
                first, second = (i, i + self.d // 2) if half else (2 * i, 2 * i + 1)
                cosine, sine = map(self.real, turn(place, i, self.d, self.config.rope_theta))
                new[first] = old[first] * cosine - old[second] * sine
                new[second] = old[second] * cosine + old[first] * sine
        return rotated

    def is_visible(self, b: int, t: int, s: int) -> bool:
        """[MASK-1] to [KEY-1]."""
        P, config = self.P, self.config
        (n, p), (m, _) = divmod(t, P), divmod(s, P)
        key_mask, ids, key_ids = (
            self.indices.get("key_mask"),
            self.indices.get("segment_ids"),
            self.of_keys("segment_ids"),
        )
        if key_mask is not None and not key_mask[b, m]:
            return False
        if ids is not None and key_ids is not None and int(ids[b, n]) != int(key_ids[b, m]):
            return False
        token = self.offsets[b] + n
        behind = {"virtual": token * P + p - s, "token": token - m}
        if config.causal != "none" and behind[config.causal] < 0:
            return False
        if config.window is None:
            return True
        distance = behind[config.window_unit]
        reach = config.window * (P if config.window_unit == "virtual" else 1)
        return (abs(distance) if config.causal == "none" else distance) < reach


def complex_steps(case: Case, cotangent: Array) -> dict[str, Array]:
    """Derivatives by all elements of all seven arrays at once, one trial each, in float64."""
    tensors = {name: np.asarray(x, np.float64) for name, x in case.tensors.items()}
    count = sum(x.size for x in tensors.values())
    stepped, places, start = {}, {}, 0
    for name, x in tensors.items():
        places[name] = slice(start, start + x.size)
        step = np.zeros((x.size, count))
        step[np.arange(x.size), start + np.arange(x.size)] = STEP
        stepped[name] = x[..., None] + 1j * step.reshape(*x.shape, count)
        start += x.size
    found = Loops(stepped, case.config, np.exp, float, **case.indices).loss(cotangent)
    derivative = np.broadcast_to(np.imag(found) / STEP, (count,))
    return {name: derivative[places[name]].reshape(x.shape) for name, x in tensors.items()}


def precise_steps(case: Case, cotangent: Array) -> dict[str, Array]:
    """The same with 50 digits, one element after the other."""
    found = {}
    with mpmath.workdps(DIGITS):
        numbers = {name: _precise(x) for name, x in case.tensors.items()}
        for name, x in numbers.items():
            found[name] = np.zeros(x.shape)
            for index in np.ndindex(x.shape):
                stepped = x.copy()
                stepped[index] += mp.mpc(0, PRECISE_STEP)
                stepped_numbers = numbers | {name: stepped}
                value = Loops(stepped_numbers, case.config, mp.exp, mp.mpf, **case.indices).loss(cotangent)
                found[name][index] = float(value.imag / PRECISE_STEP)
    return found


def _precise(x: Array) -> Array:
    """An object array of mpmath numbers, one for each element."""
    numbers = np.empty(x.shape, dtype=object)
    for index in np.ndindex(x.shape):
        numbers[index] = mp.mpc(float(x[index]))
    return numbers


# Comparison


def cotangent_of(case: Case, seed: int = 0) -> Array:
    """A random one in the dtype of q."""
    q = case.tensors["q"]
    shape = (*q.shape[:3], case.tensors["v"].shape[3])
    return np.random.default_rng(seed).standard_normal(shape).astype(q.dtype)


def vjp(case: Case, cotangent: Array) -> dict[str, Array]:
    return attention_vjp(**case.arguments(), cotangent=cotangent)


def assert_close(found: Gradients, expected: Gradients, relative: float) -> None:
    """The same names, shapes and numbers, to so much of each number and of the largest one of its array.

    An element that cancellation has made small is no more accurate than the terms that it came from. What is
    0 for lack of other keys is not always 0 in the derivation.
    """
    assert list(found) == list(expected) == list(GRADIENTS)
    largest = max(np.max(np.abs(x), initial=0.0) for x in expected.values())
    for name, want in expected.items():
        assert found[name].dtype == np.float64, name
        own = np.max(np.abs(want), initial=0.0)
        slack = relative * own + 1e-16 * largest
        np.testing.assert_allclose(found[name], want, rtol=relative, atol=slack, err_msg=name, strict=True)


def assert_right(case: Case, seed: int = 0) -> None:
    cotangent = cotangent_of(case, seed)
    assert_close(vjp(case, cotangent), complex_steps(case, cotangent), 1e-13)


def assert_same_bits(found: Gradients, expected: Gradients) -> None:
    for name in GRADIENTS:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name, strict=True)


# Complex steps

BACKWARD = ("GRAD-1", "GRAD-2", "GRAD-3", "GRAD-4", "GRAD-5", "GRAD-6", "GRAD-7", "GRAD-8", "GRAD-9")


@pytest.mark.requirement(*BACKWARD)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("normalisation", ["softmax", "none"])
@pytest.mark.parametrize("rope", ROPE)
@pytest.mark.parametrize("causal", CAUSAL)
def test_every_element_under_every_configuration(
    causal: Causal, rope: Rope, normalisation: Any, per_head: bool
) -> None:
    tensors = normal_tensors(np.random.default_rng(1), per_head=per_head, **SIZES["plain"])
    pairings = ("half", "adjacent") if rope != "none" else ("half",)
    windows: tuple[dict[str, Any], ...] = ({}, {"window": 2}, {"window": 2, "window_unit": "token"})
    for window, pairing in itertools.product(windows, pairings):
        config = AttentionConfig(
            causal=causal, rope=rope, normalisation=normalisation, rope_pairing=pairing, **window
        )
        assert_right(Case(tensors, config))


def kept(rows: str) -> Array:
    return np.array([[mark == "1" for mark in row] for row in rows.split()])


ARGUMENTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "G > H": ("N < M, G > H", {}),
    "N > M: first rows empty": ("N > M, G < H", {}),
    "batch": ("batch", {}),
    "all sizes one": ("one", {}),
    "key mask": ("plain", {"key_mask": kept("11011 01101")}),
    "all keys of one batch element dropped": ("plain", {"key_mask": kept("00000 10111")}),
    "first keys dropped": ("N = M", {"key_mask": kept("0011 0001")}),
    "segments": ("N = M", {"segment_ids": np.array([[0, 0, 1, 1], [2, 3, 3, 3]])}),
    "segments of both sides": (
        "plain",
        {
            "segment_ids": np.array([[0, 0, 1, 9], [5, 5, 5, 5]]),
            "kv_segment_ids": np.array([[0, 0, 0, 1, 1], [5, 4, 4, 5, 4]]),
        },
    ),
    "positions": ("N = M", {"positions": np.array([[7, -3, 40, 0], [1, 2, 3, 5]])}),
    "positions of both sides": (
        "plain",
        {
            "positions": np.array([[9, 3, 4, 0], [1, 2, 30, 5]], np.uint8),
            "kv_positions": np.array([[1, 8, 2, -5, 0], [6, 1, 7, 2, 2]], np.int16),
        },
    ),
    "offset": ("plain", {"query_offset": 3}),
    "negative offset": ("plain", {"query_offset": -2}),
    "offset beyond the keys": ("plain", {"query_offset": 9}),
    "offset for each row": ("batch", {"query_offset": np.array([3, -1, 1])}),
    "rows before all keys, and dropped keys": (
        "batch",
        {"query_offset": np.array([-1, 0, 2], np.int8), "key_mask": kept("1011 0111 1110")},
    ),
    "everything at once": (
        "N = M",
        {
            "key_mask": kept("1011 1101"),
            "segment_ids": np.array([[0, 0, 0, 1], [4, 4, 4, 4]]),
            "positions": np.array([[3, 1, 4, 1], [5, 9, 2, 6]]),
            "query_offset": np.array([1, -1]),
        },
    ),
}
ONE = dict.fromkeys("BNMHGPe", 1) | {"d": 2}


@pytest.mark.requirement(*BACKWARD)
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_element_with_every_argument(name: str, causal: Causal) -> None:
    sizes, indices = ARGUMENTS[name]
    for per_head, config in itertools.product(
        (False, True),
        (
            AttentionConfig(causal=causal),
            AttentionConfig(causal=causal, rope="token", window=2, scale=0.3),
            AttentionConfig(causal=causal, normalisation="none", rope_pairing="adjacent", rope_theta=7.0),
        ),
    ):
        chosen = ONE if sizes == "one" else SIZES[sizes]
        tensors = normal_tensors(np.random.default_rng(2), per_head=per_head, **chosen)
        assert_right(Case(tensors, config, indices))


@pytest.mark.requirement(*BACKWARD)
@pytest.mark.parametrize("seed", range(200))
def test_every_element_of_random_calls(seed: int) -> None:
    assert_right(random_case(seed), seed)


@pytest.mark.requirement(*BACKWARD)
@pytest.mark.parametrize("profile", PROFILES)
def test_profiles(profile: str) -> None:
    for kind in PROFILES[profile].collapse:
        tensors = normal_tensors(np.random.default_rng(3), per_head=kind == "per_head", **SIZES["plain"])
        assert_right(Case(tensors, PROFILES[profile].config))


def test_the_derivation_computes_the_operation() -> None:
    """Complex steps are derivatives of what the loops compute, so that has to be the loss."""
    for seed in range(60):
        case = random_case(seed)
        cotangent = cotangent_of(case)
        wide = {name: x[..., None] + 0j for name, x in case.tensors.items()}
        found = Loops(wide, case.config, np.exp, float, **case.indices).loss(cotangent)
        terms = cotangent * case.output()
        np.testing.assert_allclose(
            np.real(found), np.sum(terms), rtol=0, atol=1e-12 * np.sum(np.abs(terms)) + 1e-15
        )


# Fifty digits

PRECISE: Mapping[str, tuple[dict[str, int], AttentionConfig, dict[str, Any]]] = {
    "paper": (
        {"B": 1, "N": 2, "M": 3, "H": 2, "G": 1, "P": 2, "d": 4, "e": 1},
        PROFILES["paper"].config,
        {},
    ),
    "theory": (
        {"B": 1, "N": 2, "M": 3, "H": 2, "G": 3, "P": 2, "d": 1, "e": 2},
        PROFILES["theory"].config,
        {},
    ),
    "mha-preserving": (
        {"B": 1, "N": 3, "M": 3, "H": 2, "G": 1, "P": 2, "d": 2, "e": 1},
        PROFILES["mha-preserving"].config,
        {"key_mask": kept("011")},
    ),
    "linear": (
        {"B": 2, "N": 1, "M": 2, "H": 2, "G": 1, "P": 2, "d": 2, "e": 1},
        AttentionConfig(normalisation="none", causal="none", scale=1.7),
        {},
    ),
    "window": (
        {"B": 1, "N": 3, "M": 4, "H": 1, "G": 2, "P": 3, "d": 2, "e": 1},
        AttentionConfig(window=1, rope_pairing="adjacent", rope_theta=3.0),
        {},
    ),
    "far positions": (
        {"B": 1, "N": 2, "M": 2, "H": 2, "G": 1, "P": 1, "d": 4, "e": 1},
        AttentionConfig(causal="none", rope="token", rope_theta=2.0),
        {"positions": np.array([[5, 12]])},
    ),
    "empty rows": (
        {"B": 2, "N": 3, "M": 2, "H": 1, "G": 1, "P": 2, "d": 2, "e": 2},
        AttentionConfig(),
        {"query_offset": np.array([-2, 0])},
    ),
}


@pytest.mark.requirement(*BACKWARD)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("name", PRECISE)
def test_fifty_digits(name: str, per_head: bool) -> None:
    sizes, config, indices = PRECISE[name]
    tensors = normal_tensors(np.random.default_rng(4), per_head=per_head, **sizes)
    case = Case(tensors, config, indices)
    cotangent = cotangent_of(case)
    expected = precise_steps(case, cotangent)
    assert_close(vjp(case, cotangent), expected, 1e-14)
    assert_close(complex_steps(case, cotangent), expected, 1e-14)


# What is hidden

POISONS = (np.nan, np.inf, -np.inf)
MASKED = {"key_mask": kept("1101 0110")}


def poisoned(case: Case, poison: float, where: Mapping[str, Array]) -> Case:
    """The case with arrays that hold something else at some of their tokens, (B, N) or (B, M)."""
    changed = {name: np.where(at[:, :, None, None], poison, case.tensors[name]) for name, at in where.items()}
    return case.replace(**changed)


@pytest.mark.requirement("GRAD-8")
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("normalisation", ["softmax", "none"])
def test_dropped_keys_have_exact_zeros_and_change_no_bit(
    poison: float, causal: Causal, normalisation: Any
) -> None:
    for rope, per_head in itertools.product(ROPE, (False, True)):
        config = AttentionConfig(causal=causal, rope=rope, normalisation=normalisation)
        tensors = normal_tensors(np.random.default_rng(5), per_head=per_head, **SIZES["N = M"])
        case = Case(tensors, config, MASKED)
        cotangent = cotangent_of(case)
        expected = vjp(case, cotangent)
        dropped = ~MASKED["key_mask"]
        assert_same_bits(vjp(poisoned(case, poison, {"k": dropped, "v": dropped}), cotangent), expected)
        for name in "kv":
            assert not np.any(expected[name][dropped])
            assert np.all(np.any(expected[name][~dropped], axis=(1, 2)))
        for gradient in expected.values():
            assert np.isfinite(gradient).all()


@pytest.mark.requirement("GRAD-8")
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize(
    ("config", "indices", "queries", "keys"),
    [
        (AttentionConfig(), {"query_offset": -2}, "1100 1100", "0011 0011"),
        (AttentionConfig(causal="token"), {"query_offset": np.array([0, -1])}, "0000 1000", "0000 0001"),
        (AttentionConfig(window=1, window_unit="token"), {"query_offset": 2}, "0011 0011", "1100 1100"),
        (AttentionConfig(causal="none", window=1), {"query_offset": 6}, "1111 1111", "1111 1111"),
        (
            AttentionConfig(causal="none", normalisation="none"),
            {
                "segment_ids": np.array([[1, 1, 2, 2]] * 2),
                "kv_segment_ids": np.array([[1, 1, 3, 1], [2, 2, 1, 1]]),
            },
            "0011 0000",
            "0010 0000",
        ),
    ],
)
def test_what_nobody_sees_and_what_sees_nothing(
    poison: float, config: AttentionConfig, indices: dict[str, Any], queries: str, keys: str
) -> None:
    """Hidden by causality, window or segments: the reference isolates it whatever it holds ([KEY-3])."""
    case = Case(normal_tensors(np.random.default_rng(6), **SIZES["N = M"]), config, indices)
    cotangent = cotangent_of(case)
    expected = vjp(case, cotangent)
    blind, unseen = kept(queries), kept(keys)
    found = vjp(poisoned(case, poison, {"q": blind, "k": unseen, "v": unseen}), cotangent)
    assert_same_bits(found, expected)
    for name, nothing in (("q", blind), ("k", unseen), ("v", unseen)):
        assert not np.any(expected[name][nothing])
        assert np.all(np.any(expected[name][~nothing], axis=(1, 2)))


@pytest.mark.requirement("GRAD-8")
def test_a_query_that_sees_nothing_gives_nothing_whatever_its_cotangent() -> None:
    case = Case(normal_tensors(np.random.default_rng(7), **SIZES["N > M, G < H"]), AttentionConfig())
    cotangent = cotangent_of(case)
    silent = cotangent.copy()
    silent[:, 0] = 1e3  # query 0 stands before all keys
    assert_same_bits(vjp(case, silent), vjp(case, cotangent))


# Exact answers


@pytest.mark.requirement("GRAD-2", "GRAD-3", "GRAD-6")
@pytest.mark.parametrize("per_head", [False, True])
def test_one_key_gives_the_cotangent_through_collapse_and_mixing(per_head: bool) -> None:
    """N = M = P = 1: the output is R alpha_v v, whatever the query and the key."""
    sizes = {"B": 2, "N": 1, "M": 1, "H": 3, "G": 2, "P": 1, "d": 4, "e": 5}
    rng = np.random.default_rng(8)
    case = Case(normal_tensors(rng, per_head=per_head, **sizes), AttentionConfig())
    case = case.replace(**{name: np.rint(8 * x) for name, x in case.tensors.items()})
    cotangent = np.rint(8 * cotangent_of(case))
    found = vjp(case, cotangent)
    for name in ("q", "k", "alpha_q", "alpha_k"):
        assert not np.any(found[name]), name
    v, alpha, collapse = case.tensors["v"], case.tensors["alpha_v"][:, :, 0], case.tensors["collapse"]
    R = np.diag(collapse[:, 0]) if per_head else collapse[:, :, 0]
    back = np.stack([R.T @ of_element for of_element in cotangent[:, 0]])  # (B, H, e)
    mixed = np.stack([alpha.T @ of_element for of_element in v[:, 0]])
    np.testing.assert_array_equal(found["v"][:, 0], np.stack([alpha @ of_element for of_element in back]))
    np.testing.assert_array_equal(
        found["alpha_v"][:, :, 0], sum(x @ y.T for x, y in zip(v[:, 0], back, strict=True))
    )
    whole = sum(x @ y.T for x, y in zip(cotangent[:, 0], mixed, strict=True))
    expected = np.diag(whole) if per_head else whole
    np.testing.assert_array_equal(found["collapse"][..., 0], expected)


@pytest.mark.requirement("GRAD-3", "GRAD-4")
def test_two_keys_by_hand() -> None:
    """Logits 0, weights 1/2, values 0 and 4, cotangent 1: l̄ = ½(0 − 2) and ½(4 − 2). The scale is 2."""
    one = np.ones((1, 1, 1))
    tensors = {"q": np.full((1, 1, 1, 1), 3.0), "k": np.zeros((1, 2, 1, 1))}
    tensors |= {"v": np.array([0.0, 4.0]).reshape(1, 2, 1, 1), "alpha_q": one, "alpha_k": one}
    tensors |= {"alpha_v": one, "collapse": one}
    case = Case(tensors, AttentionConfig(causal="none", rope="none", scale=2.0))
    found = vjp(case, np.ones((1, 1, 1, 1)))
    expected = {"q": [0], "k": [-6, 6], "v": [0.5, 0.5], "alpha_q": [0], "alpha_k": [0]}
    expected |= {"alpha_v": [2], "collapse": [2]}
    for name, numbers in expected.items():
        assert found[name].ravel().tolist() == numbers, name
    # Keys 1 and -1 in a lane where the query is 0: the logits stay 0, and the query receives 2 (-1 - 1).
    k = np.array([[0.0, 1.0], [0.0, -1.0]]).reshape(1, 2, 1, 2)
    turned = case.replace(q=np.array([3.0, 0.0]).reshape(1, 1, 1, 2), k=k)
    found = vjp(turned, np.ones((1, 1, 1, 1)))
    assert found["q"].ravel().tolist() == [0.0, -4.0]
    assert found["k"].ravel().tolist() == [-6.0, 0.0, 6.0, 0.0]


# Identities


def identity_cases() -> list[Case]:
    return [random_case(seed) for seed in range(300, 360)]


def pairing(case: Case, gradients: Gradients, name: str, axes: str = "") -> Array:
    """Sum of an array times its gradient over all but its named axes, such as "g" of "bngj"."""
    x, bar = case.tensors[name], gradients[name]
    letters = "bngj" if name in "qkv" else ("ihp" if name == "collapse" else "ghp")
    letters = letters if len(letters) == x.ndim else "hp"
    found: Array = np.einsum(f"{letters},{letters}->{axes}", x, bar)
    return found


def assert_equal_sums(found: Any, expected: Any, size: float) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * size + 1e-300)


def size_of(case: Case, gradients: Gradients, *names: str) -> float:
    return max(float(np.sum(np.abs(case.tensors[name] * gradients[name]))) for name in names)


@pytest.mark.requirement("GRAD-1", "GRAD-2", "GRAD-6", "GRAD-7")
def test_the_output_is_linear_in_values_mixing_and_collapse() -> None:
    for case in identity_cases():
        cotangent = cotangent_of(case)
        found, output = vjp(case, cotangent), case.output()
        size = max(np.sum(np.abs(cotangent * output)), size_of(case, found, "v", "alpha_v", "collapse"))
        for name in ("v", "alpha_v", "collapse"):
            assert_equal_sums(pairing(case, found, name), np.sum(cotangent * output), size)


@pytest.mark.requirement("GRAD-6", "GRAD-7")
def test_a_source_head_may_be_scaled_in_data_or_in_mixing() -> None:
    for case in identity_cases():
        found = vjp(case, cotangent_of(case))
        for name in "qkv":
            mixing = f"alpha_{name}"
            size = size_of(case, found, name, mixing)
            assert_equal_sums(pairing(case, found, name, "g"), pairing(case, found, mixing, "g"), size)


@pytest.mark.requirement("GRAD-3", "GRAD-4", "GRAD-7")
def test_a_target_head_may_be_scaled_in_queries_or_in_keys() -> None:
    """A logit is a product of both: Σ q q̄ = Σ k k̄ = Σ l l̄, per target head in the mixing tensors."""
    for case in identity_cases():
        cotangent = cotangent_of(case)
        found = vjp(case, cotangent)
        size = size_of(case, found, "q", "k", "alpha_q", "alpha_k")
        assert_equal_sums(pairing(case, found, "q"), pairing(case, found, "k"), size)
        assert_equal_sums(pairing(case, found, "alpha_q", "h"), pairing(case, found, "alpha_k", "h"), size)
        if case.config.normalisation == "none":
            terms = cotangent * case.output()
            assert_equal_sums(pairing(case, found, "q"), np.sum(terms), max(size, np.sum(np.abs(terms))))


@pytest.mark.requirement("GRAD-1", "GRAD-2", "GRAD-7")
def test_a_pseudo_output_may_be_scaled_in_collapse_alone() -> None:
    """Per pseudo-head of the output side: what R receives is what its virtual outputs received."""
    for case in identity_cases():
        cotangent = cotangent_of(case)
        stages, R = case.stages(), case.tensors["collapse"]
        B, T, H, e = stages["virtual_out"].shape
        P = R.shape[-1]
        rows = stages["virtual_out"].reshape(B, T // P, P, H, e)
        if R.ndim == 2:
            terms = cotangent[:, :, None] * R.T[:, :, None] * rows  # (B, N, P, H, e)
            expected = np.sum(terms, axis=(0, 1, 4)).T
        else:
            terms = np.einsum("bnij,ihp,bnphj->bnijhp", cotangent, R, rows)
            expected = np.sum(terms, axis=(0, 1, 2, 3))
        found = np.sum((R * vjp(case, cotangent)["collapse"]).reshape(-1, H, P), axis=0)
        assert_equal_sums(found, expected, float(np.sum(np.abs(terms))))


@pytest.mark.requirement("GRAD-3")
def test_the_gradients_of_a_row_of_logits_add_up_to_nothing() -> None:
    """Under softmax; and hidden ones are 0 in any case ([GRAD-8])."""
    checked = 0
    for case in identity_cases():
        names = ("key_mask", "segment_ids", "kv_segment_ids", "positions", "kv_positions", "query_offset")
        optional = {name: case.indices.get(name) for name in names}
        arrays = [case.tensors[name] for name in GRADIENTS]
        call = forward(arrays, cotangent_of(case), case.config, optional)
        bars = backward(call, case.config, optional)
        rows, size = bars["logits"].sum(axis=-1), np.abs(bars["logits"]).sum(axis=-1)
        if case.config.normalisation == "softmax":
            assert np.all(np.abs(rows) <= 1e-13 * (size + np.max(size, initial=0.0)))
        assert not np.any(bars["logits"][~np.broadcast_to(call.visible[:, None], bars["logits"].shape)])
        checked += bool(np.any(bars["logits"]))
    assert checked > 20


@pytest.mark.requirement("GRAD-3", "GRAD-4")
def test_softmax_does_not_feel_what_all_keys_share() -> None:
    """One source and target head, no rotation: a vector added to all keys moves every row by a constant."""
    sizes = {"B": 2, "N": 4, "M": 5, "H": 1, "G": 1, "P": 1, "d": 6, "e": 3}
    for causal in CAUSAL:
        config = AttentionConfig(causal=causal, rope="none")
        case = Case(normal_tensors(np.random.default_rng(9), **sizes), config)
        found = vjp(case, cotangent_of(case))
        assert np.all(np.abs(found["k"].sum(axis=1)) <= 1e-14 * np.abs(found["k"]).sum(axis=1).max())


@pytest.mark.requirement("GRAD-2")
def test_linear_in_the_cotangent() -> None:
    for case in identity_cases():
        first, second = cotangent_of(case, 1), cotangent_of(case, 2)
        of_first, of_second = vjp(case, first), vjp(case, second)
        doubled = {name: 2.0 * x for name, x in of_first.items()}
        assert_same_bits(vjp(case, 2.0 * first), doubled)
        both = vjp(case, 3.0 * first - 0.7 * second)
        size = {name: 3.0 * np.abs(of_first[name]) + 0.7 * np.abs(of_second[name]) for name in GRADIENTS}
        for name in GRADIENTS:
            expected = 3.0 * of_first[name] - 0.7 * of_second[name]
            slack = 1e-12 * np.max(size[name], initial=0.0) + 1e-300
            np.testing.assert_allclose(both[name], expected, rtol=0, atol=slack)
        for gradient in vjp(case, 0.0 * first).values():
            assert not np.any(gradient)


@pytest.mark.requirement("GRAD-6", "GRAD-7")
def test_heads_may_be_permuted() -> None:
    """Source heads with the first axis of their mixing tensor, target heads with the second ones."""
    rng = np.random.default_rng(10)
    for case in identity_cases():
        cotangent = cotangent_of(case)
        expected = vjp(case, cotangent)
        order = {name: rng.permutation(case.tensors[name].shape[2]) for name in "qk"}
        order["v"] = rng.permutation(case.tensors["v"].shape[2])

        def by_source(arrays: Gradients, order: Mapping[str, Array] = order) -> dict[str, Array]:
            moved = {name: arrays[name][:, :, order[name]] for name in "qkv"}
            return moved | {f"alpha_{name}": arrays[f"alpha_{name}"][order[name]] for name in "qkv"}

        found = vjp(case.replace(**by_source(case.tensors)), cotangent)
        assert_close(found, expected | by_source(expected) | {"collapse": expected["collapse"]}, 1e-12)
        if case.tensors["collapse"].ndim == 2:
            continue  # its heads are those of the output, too
        heads = order["q"]

        def by_target(arrays: Gradients, heads: Array = heads) -> dict[str, Array]:
            names = ("alpha_q", "alpha_k", "alpha_v", "collapse")
            return {name: arrays[name][:, heads] for name in names}

        found = vjp(case.replace(**by_target(case.tensors)), cotangent)
        assert_close(found, expected | by_target(expected), 1e-12)


@pytest.mark.requirement("GRAD-1", "GRAD-7")
def test_batch_elements_add_up_in_parameters_alone() -> None:
    for case in identity_cases():
        cotangent = cotangent_of(case)
        whole = vjp(case, cotangent)
        parts = []
        for b in range(len(cotangent)):
            one = {name: case.tensors[name][b : b + 1] for name in "qkv"}
            one |= {
                name: x[b : b + 1] if np.ndim(x) else x for name, x in case.indices.items() if x is not None
            }
            parts.append(vjp(case.replace(**one), cotangent[b : b + 1]))
        for name in GRADIENTS:
            of_batch = [part[name] for part in parts]
            if name in "qkv":
                merged = np.concatenate(of_batch or [whole[name]])
            else:
                merged = sum(of_batch, np.zeros_like(whole[name]))
            size = max((np.max(np.abs(x), initial=0.0) for x in of_batch), default=0.0)
            np.testing.assert_allclose(whole[name], merged, rtol=0, atol=1e-13 * size)


# Sizes, dtypes, layouts


@pytest.mark.requirement("GRAD-9")
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("normalisation", ["softmax", "none"])
@pytest.mark.parametrize(("B", "N", "M"), [(0, 3, 4), (2, 0, 3), (2, 3, 0), (0, 0, 0), (2, 0, 0)])
def test_empty_sizes_have_empty_gradients_or_zeros(
    B: int, N: int, M: int, normalisation: Any, per_head: bool
) -> None:
    tensors = normal_tensors(np.random.default_rng(11), B=B, N=N, M=M, H=3, G=2, per_head=per_head)
    case = Case(tensors, AttentionConfig(normalisation=normalisation))
    for name, gradient in vjp(case, cotangent_of(case)).items():
        assert gradient.shape == case.tensors[name].shape
        assert gradient.dtype == np.float64
        assert not np.any(gradient)


@pytest.mark.requirement("GRAD-9", "TYP-2")
@pytest.mark.parametrize(
    ("storage", "parameters"),
    [
        (np.float64, np.float64),
        (np.float32, np.float32),
        (np.float16, np.float16),
        (np.float16, np.float32),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
        (ml_dtypes.bfloat16, np.float32),
    ],
)
@pytest.mark.parametrize("seed", range(6))
def test_inputs_of_any_dtype_are_taken_exactly(storage: Any, parameters: Any, seed: int) -> None:
    """The result is float64, that of the widened inputs to the last bit."""
    case = random_case(2000 + seed)
    narrow = case.replace(
        **{name: x.astype(storage if name in "qkv" else parameters) for name, x in case.tensors.items()}
    )
    wide = narrow.replace(**{name: x.astype(np.float64) for name, x in narrow.tensors.items()})
    cotangent = cotangent_of(narrow)
    assert cotangent.dtype == storage
    found = vjp(narrow, cotangent)
    assert list(found) == list(GRADIENTS)
    assert all(gradient.dtype == np.float64 for gradient in found.values())
    assert_same_bits(found, vjp(wide, cotangent.astype(np.float64)))
    assert_right(wide)


@pytest.mark.requirement("ARG-5")
def test_memory_layout_does_not_matter_and_nothing_is_written_to() -> None:
    for seed in range(400, 412):
        case = random_case(seed)
        cotangent = cotangent_of(case)
        expected = vjp(case, cotangent)

        def strided(array: Array) -> Array:
            return np.repeat(np.asfortranarray(array), 2, axis=-1)[..., ::2]

        views = {name: strided(x) for name, x in (case.tensors | {"cotangent": cotangent}).items()}
        before = {name: view.copy() for name, view in views.items()}
        for view in views.values():
            view.flags.writeable = False
        found = vjp(case.replace(**{name: views[name] for name in GRADIENTS}), views["cotangent"])
        assert_close(found, expected, 1e-12)
        for name, view in views.items():
            np.testing.assert_array_equal(view, before[name])
        for gradient in found.values():
            assert not any(np.shares_memory(gradient, view) for view in views.values())


# Errors


def plain_case(dtype: Any = np.float32) -> Case:
    tensors = normal_tensors(np.random.default_rng(12), **SIZES["plain"])
    return Case({name: x.astype(dtype) for name, x in tensors.items()}, AttentionConfig())


def refused(case: Case, cotangent: Any) -> IHAError:
    with pytest.raises(IHAError) as caught:
        attention_vjp(**case.arguments(), cotangent=cotangent)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.requirement("GRAD-9", "ERR-1")
@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ((2, 4, 3), "(2, 4, 3)"),
        ((2, 4, 3, 7, 1), "(2, 4, 3, 7, 1)"),
        ((2, 4, 3, 6), "(2, 4, 3, 6)"),
        ((2, 4, 1, 7), "(2, 4, 1, 7)"),
        ((1, 4, 3, 7), "(1, 4, 3, 7)"),
        ((2, 5, 3, 7), "(2, 5, 3, 7)"),
        ((), "()"),
    ],
)
def test_a_cotangent_of_another_shape_is_refused(shape: tuple[int, ...], found: str) -> None:
    error = refused(plain_case(), np.zeros(shape, np.float32))
    assert isinstance(error, ShapeError)
    assert isinstance(error, ValueError)
    assert str(error) == f"`cotangent` shape: expected (B=2, N=4, H=3, e=7), got {found}"


@pytest.mark.requirement("GRAD-9", "ERR-1")
@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.bool_])
def test_a_cotangent_of_another_dtype_is_refused(dtype: Any) -> None:
    error = refused(plain_case(), np.zeros((2, 4, 3, 7), dtype))
    assert isinstance(error, DTypeError)
    assert isinstance(error, TypeError)
    name = np.dtype(dtype).name
    assert str(error) == f"`cotangent` dtype: expected float32, the dtype of `q`, got {name}"


@pytest.mark.requirement("GRAD-9", "ERR-1")
@pytest.mark.parametrize(
    ("value", "found"), [(None, "NoneType"), (1.0, "float"), ([[[[0.0]]]], "list"), ("ones", "str")]
)
def test_a_cotangent_that_is_no_array_is_refused(value: Any, found: str) -> None:
    error = refused(plain_case(), value)
    assert isinstance(error, ArgumentTypeError)
    assert str(error) == f"`cotangent`: expected an array, got {found}"


@pytest.mark.requirement("ERR-1")
@pytest.mark.parametrize(
    "changed",
    [
        {"k": np.zeros((2, 5, 2, 6), np.float32)},
        {"alpha_k": np.zeros((1, 3, 3), np.float32)},
        {"collapse": np.zeros((3, 3, 2), np.float64)},
        {"v": np.zeros((2, 5, 1, 7), np.float16)},
        {"key_mask": np.ones((2, 5), np.int8)},
        {"segment_ids": np.zeros((2, 4), np.int32)},
        {"kv_segment_ids": np.zeros((2, 5), np.int32)},
        {"positions": np.zeros((2, 4), np.float32)},
        {"kv_positions": np.zeros((2, 5), np.int32)},
        {"query_offset": 1.5},
        {"query_offset": np.zeros(3, np.int64)},
        {"q": np.zeros((2, 4, 3, 5), np.float32), "k": np.zeros((2, 5, 1, 5), np.float32)},
    ],
)
def test_other_bad_input_is_refused_as_by_the_operation(changed: dict[str, Any]) -> None:
    """Before the cotangent is looked at."""
    case = plain_case().replace(**changed)
    with pytest.raises(IHAError) as caught:
        attention(**case.arguments())
    error = refused(case, None)
    assert (type(error), str(error)) == (type(caught.value), str(caught.value))
