"""The NumPy reference against two independent derivations and against what the operation must be.

`oracles.loops` and `oracles.precise` were derived from SPEC.md apart from the reference and from each
other. Random configurations compare every stage with them; the other tests state identities and known
special cases in a form that needs no oracle.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import iha_core
from iha_core import PROFILES, AttentionConfig
from iha_core.config import Causal
from oracles.loops import attention_loops
from oracles.precise import attention_precise

Array = npt.NDArray[Any]
Stages = dict[str, Array]

CAUSAL: tuple[Causal, ...] = ("virtual", "token", "none")
ROPE = ("virtual", "token", "none")
WINDOW_UNIT = ("virtual", "token")
NORMALISATION = ("softmax", "none")
WIDE_WINDOW = 1000
DOUBLE_ROUNDOFF = 2.0**-53

LOOPS_SEEDS = range(300)
PRECISE_SEEDS = range(60)


# Random arguments


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the operation.

    Attributes:
        tensors: q, k, v, alpha_q, alpha_k, alpha_v and collapse by name.
        config: the configuration.
        indices: whichever of key_mask, segment ids, positions and query_offset are given.
    """

    tensors: dict[str, Array]
    config: AttentionConfig
    indices: dict[str, Any] = dataclasses.field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        return {**self.tensors, "config": self.config, **self.indices}

    def replace(self, **arguments: Any) -> Case:
        """The same call with some arguments replaced, by their names in the signature."""
        config = arguments.pop("config", self.config)
        tensors = {name: arguments.pop(name, array) for name, array in self.tensors.items()}
        return Case(tensors, config, {**self.indices, **arguments})

    def stages(self) -> Stages:
        return iha_core.attention_stages(**self.arguments())

    def output(self) -> Array:
        return self.stages()["output"]


def normal_tensors(
    rng: np.random.Generator,
    *,
    B: int = 2,
    N: int = 5,
    M: int | None = None,
    H: int = 2,
    G: int | None = None,
    P: int = 2,
    d: int = 4,
    e: int = 3,
    per_head: bool = False,
) -> dict[str, Array]:
    """Unit normal tensors of the given sizes; M defaults to N and G to H."""
    M = N if M is None else M
    G = H if G is None else G
    return {
        "q": rng.standard_normal((B, N, H, d)),
        "k": rng.standard_normal((B, M, G, d)),
        "v": rng.standard_normal((B, M, G, e)),
        "alpha_q": rng.standard_normal((H, H, P)),
        "alpha_k": rng.standard_normal((G, H, P)),
        "alpha_v": rng.standard_normal((G, H, P)),
        "collapse": rng.standard_normal((H, P) if per_head else (H, H, P)),
    }


def random_case(
    seed: int, *, most_tokens: int = 5, most_heads: int = 3, widths: int = 6, reach: int = 40
) -> Case:
    """A call with every argument and every field of the configuration drawn at random.

    Args:
        seed: determines the case.
        most_tokens, most_heads: largest N and M, largest H and G.
        widths: largest d and e.
        reach: largest absolute position.
    """
    rng = np.random.default_rng([20260221, seed])

    def pick(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    def integers(low: int, high: int, shape: tuple[int, ...]) -> Array:
        dtype = pick(np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32)
        return rng.integers(0 if np.issubdtype(dtype, np.unsignedinteger) else low, high, shape).astype(dtype)

    config = AttentionConfig(
        causal=pick(*CAUSAL),
        window=pick(None, 1, 2, WIDE_WINDOW),
        window_unit=pick(*WINDOW_UNIT),
        rope=pick(*ROPE),
        rope_theta=pick(500000.0, 10000.0, 3.7, 0.8),
        rope_pairing=pick("half", "adjacent"),
        scale=pick(None, 0.31, 1.7),
        normalisation=pick("softmax", "softmax", "none"),
    )
    segments = pick(None, None, "one", "both")
    places = pick(None, None, "one", "both")
    B = pick(1, 1, 2, 2, 3, 0) if seed % 5 == 0 else pick(1, 2)
    N = int(rng.integers(0 if seed % 4 == 0 else 1, most_tokens + 1))
    M = int(rng.integers(0 if seed % 4 == 1 else 1, most_tokens + 1))
    if "one" in (segments, places):
        M = N
    H, G = (int(size) for size in rng.integers(1, most_heads + 1, 2))
    d = int(rng.integers(1, widths + 1))
    if config.rope != "none":
        d += d % 2
    tensors = normal_tensors(
        rng,
        B=B,
        N=N,
        M=M,
        H=H,
        G=G,
        P=pick(1, 2, 2, 3),
        d=d,
        e=int(rng.integers(1, widths + 1)),
        per_head=pick(False, True),
    )

    indices: dict[str, Any] = {}
    if pick(False, True):
        indices["key_mask"] = rng.random((B, M)) < pick(0.3, 0.7)
    if segments:
        indices["segment_ids"] = integers(-1, 2, (B, N))
    if segments == "both":
        indices["kv_segment_ids"] = integers(-1, 2, (B, M))
    if places:
        indices["positions"] = integers(-reach, reach + 1, (B, N))
    if places == "both":
        indices["kv_positions"] = integers(-reach, reach + 1, (B, M))
    offset = pick(None, None, "int", "negative", "0-d", "per row")
    if offset == "int":
        indices["query_offset"] = int(rng.integers(0, most_tokens + 2))
    elif offset == "negative":
        indices["query_offset"] = -int(rng.integers(1, most_tokens + 1))
    elif offset == "0-d":
        indices["query_offset"] = integers(-2, most_tokens, ())
    elif offset == "per row":
        indices["query_offset"] = integers(-3, most_tokens, (B,))
    return Case(tensors, config, indices)


def precise_case(seed: int) -> Case:
    return random_case(seed, most_tokens=3, most_heads=3, widths=4, reach=6)


# Comparison


def magnitudes(case: Case, expected: Stages) -> Stages:
    """Sum of the absolute values of the terms behind each element, propagated from stage to stage.

    A rounding error of an element is a small multiple of the roundoff times this; relative to the element
    itself it may be anything, by cancellation. The norm of a head vector bounds what rotation makes of it.
    """
    size = {name: np.abs(array.astype(np.float64)) for name, array in case.tensors.items()}
    B, N, H, d = case.tensors["q"].shape
    _, M, _, e = case.tensors["v"].shape
    P = case.tensors["alpha_q"].shape[2]
    scale = case.config.resolve_scale(d)
    mixed_q = np.einsum("ghp,bngj->bnphj", size["alpha_q"], size["q"]).reshape(B, N * P, H, d)
    mixed_k = np.einsum("ghp,bmgj->bmphj", size["alpha_k"], size["k"]).reshape(B, M * P, H, d)
    mixed_v = np.einsum("ghp,bmgj->bmphj", size["alpha_v"], size["v"]).reshape(B, M * P, H, e)
    rotated_q = np.linalg.norm(mixed_q, axis=-1, keepdims=True)
    rotated_k = np.linalg.norm(mixed_k, axis=-1, keepdims=True)
    logits = scale * np.einsum("bthj,bshj->bhts", rotated_q, rotated_k)
    found = {
        "mixed_q": mixed_q,
        "mixed_k": mixed_k,
        "mixed_v": mixed_v,
        "rotated_q": rotated_q,
        "rotated_k": rotated_k,
        "logits": logits,
    }
    if "lse" in expected:
        lse = expected["lse"]
        attended = np.where(np.isneginf(lse), 0.0, lse)[..., None]
        weights = np.exp(expected["logits"] - attended)
        found["lse"] = 1.0 + logits.max(axis=-1, initial=0.0)
    else:
        weights = logits
    found["virtual_out"] = np.einsum("bhts,bshj->bthj", weights, mixed_v)
    pseudo_outputs = found["virtual_out"].reshape(B, N, P, H, e)
    equation = "ihp,bnphj->bnij" if size["collapse"].ndim == 3 else "hp,bnphj->bnhj"
    found["output"] = np.einsum(equation, size["collapse"], pseudo_outputs)
    return found


def assert_stages_agree(case: Case, actual: Stages, expected: Stages, tolerance: float) -> None:
    """Every stage within `tolerance` times its magnitude; the same names, order, shapes and infinities."""
    assert list(actual) == list(expected)
    bounds = magnitudes(case, expected)
    for name, want in expected.items():
        have = actual[name]
        assert have.dtype == np.float64, name
        assert have.shape == want.shape, name
        finite = np.isfinite(want)
        np.testing.assert_array_equal(have[~finite], want[~finite], err_msg=name)
        error = np.abs(have[finite] - want[finite])
        allowed = tolerance * np.broadcast_to(bounds[name], want.shape)[finite]
        worst = np.max(error / np.maximum(allowed, np.finfo(np.float64).tiny), initial=0.0)
        assert worst <= 1, f"{name}: error is {worst:.3g} times the tolerance"


# The oracles


@pytest.mark.requirement(
    *("MIX-1", "MIX-2", "MIX-3", "MIX-4", "IDX-1", "MASK-1", "MASK-2", "MASK-3", "WIN-1", "WIN-2", "WIN-3"),
    *("SEG-1", "KEY-1", "POS-1", "POS-2", "POS-3", "ROPE-1", "ROPE-2", "ROPE-3", "ROPE-4", "LOG-1", "LOG-2"),
    *("LOG-3", "SOFT-1", "SOFT-2", "SOFT-3", "LIN-1", "OUT-1", "COL-1", "COL-2", "STG-1", "DIM-2"),
    *("ARG-1", "ARG-2", "ARG-3", "ARG-4"),
)
@pytest.mark.parametrize("seed", LOOPS_SEEDS)
def test_every_stage_equals_the_loops(seed: int) -> None:
    case = random_case(seed)
    assert_stages_agree(case, case.stages(), attention_loops(**case.arguments()), 1e-12)


@pytest.mark.requirement("MIX-1", "ROPE-5", "LOG-2", "SOFT-1", "OUT-1")
@pytest.mark.parametrize("seed", PRECISE_SEEDS)
def test_every_stage_equals_fifty_digits(seed: int) -> None:
    case = precise_case(seed)
    assert_stages_agree(case, case.stages(), attention_precise(**case.arguments()), 1e-13)


@pytest.mark.parametrize("seed", PRECISE_SEEDS)
def test_the_two_derivations_agree(seed: int) -> None:
    case = precise_case(seed)
    expected = attention_precise(**case.arguments())
    assert_stages_agree(case, attention_loops(**case.arguments()), expected, 1e-13)


def test_random_cases_reach_every_choice() -> None:
    """Guards the generator: a choice it no longer makes would silently go untested."""
    cases = [random_case(seed) for seed in LOOPS_SEEDS]
    configs = [case.config for case in cases]
    masks = {(config.causal, config.window, config.window_unit) for config in configs}
    assert masks == set(itertools.product(CAUSAL, (None, 1, 2, WIDE_WINDOW), WINDOW_UNIT))
    rotations = {(config.rope, config.rope_pairing, config.rope_theta) for config in configs}
    assert len(rotations) == 3 * 2 * 4
    assert len({(config.scale, config.normalisation) for config in configs}) == 3 * 2
    assert {(config.causal, config.normalisation) for config in configs} == set(
        itertools.product(CAUSAL, NORMALISATION)
    )

    sizes = [(*case.tensors["q"].shape[:3], *case.tensors["v"].shape[1:3]) for case in cases]
    B, N, H, M, G = (set(column) for column in zip(*sizes, strict=True))
    assert {0, 1, 2} <= B
    assert set(range(6)) == N == M
    assert {1, 2, 3} == H == G
    assert {(n > m) - (n < m) for _, n, _, m, _ in sizes} == {-1, 0, 1}
    assert {(h > g) - (h < g) for _, _, h, _, g in sizes} == {-1, 0, 1}
    assert {(case.tensors["alpha_q"].shape[2], case.tensors["collapse"].ndim) for case in cases} == set(
        itertools.product((1, 2, 3), (2, 3))
    )
    assert any(case.tensors["q"].shape[3] != case.tensors["v"].shape[3] for case in cases)

    for names in (("segment_ids", "kv_segment_ids"), ("positions", "kv_positions")):
        assert {tuple(name in case.indices for name in names) for case in cases} == {
            (False, False),
            (True, False),
            (True, True),
        }
    assert {"key_mask" in case.indices for case in cases} == {False, True}
    offsets = [case.indices.get("query_offset") for case in cases]
    assert any(offset is None for offset in offsets)
    assert any(isinstance(offset, int) and offset > 0 for offset in offsets)
    assert any(isinstance(offset, int) and offset < 0 for offset in offsets)
    assert {np.ndim(offset) for offset in offsets if isinstance(offset, np.ndarray)} == {0, 1}


# Storage and parameter dtypes, memory layout


@pytest.mark.requirement("TYP-1", "TYP-2")
@pytest.mark.parametrize(
    ("storage", "parameters"),
    [
        (np.float32, np.float32),
        (np.float16, np.float16),
        (np.float16, np.float32),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
        (ml_dtypes.bfloat16, np.float32),
    ],
)
@pytest.mark.parametrize("seed", range(8))
def test_narrow_inputs_are_taken_exactly(storage: Any, parameters: Any, seed: int) -> None:
    """The reference computes in float64 from the exact values of narrow inputs, rounding none between."""
    case = random_case(1000 + seed)
    narrow = {
        name: array.astype(storage if name in "qkv" else parameters) for name, array in case.tensors.items()
    }
    case = case.replace(**narrow)
    wide = case.replace(**{name: array.astype(np.float64) for name, array in narrow.items()})
    assert_stages_agree(wide, case.stages(), attention_loops(**wide.arguments()), 1e-12)


@pytest.mark.requirement("ARG-5")
@pytest.mark.parametrize("seed", range(12))
def test_memory_layout_does_not_matter(seed: int) -> None:
    case = random_case(2000 + seed)

    def strided(array: Array) -> Array:
        spaced = np.repeat(np.asfortranarray(array), 2, axis=-1)[..., ::2]
        return np.flip(np.flip(spaced).copy())

    views = {
        name: strided(value)
        for name, value in {**case.tensors, **case.indices}.items()
        if isinstance(value, np.ndarray) and value.ndim
    }
    before = {name: view.copy() for name, view in views.items()}
    for name, want in case.stages().items():
        np.testing.assert_allclose(case.replace(**views).stages()[name], want, rtol=1e-12, atol=1e-12)
    for name, view in views.items():
        np.testing.assert_array_equal(view, before[name], err_msg=f"{name} was written to")


@pytest.mark.requirement("ARG-5")
def test_broadcast_views_are_allowed() -> None:
    tensors = normal_tensors(np.random.default_rng(3), B=1)
    twice = {name: np.broadcast_to(tensors[name], (2, *tensors[name].shape[1:])) for name in "qkv"}
    case = Case(tensors, AttentionConfig())
    np.testing.assert_array_equal(case.replace(**twice).output(), np.repeat(case.output(), 2, axis=0))


# Masks


@pytest.mark.requirement("MASK-1", "MASK-2", "MASK-3")
def test_worked_example_of_the_masks() -> None:
    tensors = normal_tensors(np.random.default_rng(0), B=1, N=2, H=1, P=2)
    virtual = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    token = [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    expected: dict[Causal, Any] = {"virtual": virtual, "token": token, "none": np.ones((4, 4))}
    for causal, visible in expected.items():
        logits = Case(tensors, AttentionConfig(causal=causal)).stages()["logits"]
        np.testing.assert_array_equal(np.isfinite(logits[0, 0]), visible)


@pytest.mark.requirement("WIN-1", "WIN-2", "WIN-3")
@pytest.mark.parametrize(
    ("causal", "unit", "counts"),
    [
        ("virtual", "virtual", [6, 6, 6]),
        ("virtual", "token", [4, 5, 6]),
        ("token", "virtual", [8, 7, 6]),
        ("token", "token", [6, 6, 6]),
        ("none", "virtual", [11, 11, 11]),
        ("none", "token", [9, 9, 9]),
    ],
)
def test_keys_an_interior_query_sees(causal: Any, unit: Any, counts: list[int]) -> None:
    """W = 2 tokens of P = 3 virtual keys; one count for each pseudo index of the query."""
    tensors = normal_tensors(np.random.default_rng(0), B=1, N=9, H=1, P=3)
    config = AttentionConfig(causal=causal, window=2, window_unit=unit)
    visible = np.isfinite(Case(tensors, config).stages()["logits"][0, 0])
    assert visible.sum(axis=-1)[12:15].tolist() == counts


@pytest.mark.requirement("ARG-1", "ARG-2")
def test_query_offset_defaults_to_the_last_tokens_and_is_per_element() -> None:
    tensors = normal_tensors(np.random.default_rng(1), B=3, N=2, M=5)
    case = Case(tensors, AttentionConfig(window=2))
    np.testing.assert_array_equal(case.output(), case.replace(query_offset=3).output())
    per_element = case.replace(query_offset=np.array([-1, 0, 4])).output()
    for b, offset in enumerate((-1, 0, 4)):
        np.testing.assert_array_equal(per_element[b], case.replace(query_offset=offset).output()[b])


@pytest.mark.requirement("IDX-1", "POS-2")
def test_positions_rotate_and_never_mask() -> None:
    tensors = normal_tensors(np.random.default_rng(2))
    reversed_positions = np.broadcast_to(np.arange(5)[::-1], (2, 5))
    rotating = Case(tensors, AttentionConfig(window=2))
    moved = rotating.replace(positions=reversed_positions).stages()["logits"]
    np.testing.assert_array_equal(np.isneginf(moved), np.isneginf(rotating.stages()["logits"]))
    assert not np.allclose(moved, rotating.stages()["logits"])
    still = Case(tensors, AttentionConfig(rope="none"))
    np.testing.assert_array_equal(still.replace(positions=reversed_positions).output(), still.output())


@pytest.mark.requirement("CFG-2")
def test_fields_without_effect() -> None:
    tensors = normal_tensors(np.random.default_rng(4))
    outputs = [
        Case(tensors, AttentionConfig(rope="none", **fields)).output()
        for fields in ({}, {"window_unit": "token"}, {"rope_theta": 2.0}, {"rope_pairing": "adjacent"})
    ]
    for output in outputs[1:]:
        np.testing.assert_array_equal(output, outputs[0])


# Extremes


@pytest.mark.requirement("IDX-2", "ROPE-5")
@pytest.mark.parametrize("rope", ["virtual", "token"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_angles_at_the_ends_of_the_position_range(rope: Any, dtype: Any) -> None:
    """The angle may be off by 4·2⁻⁵³·|φ|, and the virtual position must not wrap around."""
    P, d, theta = 3, 4, 10000.0
    tensors = normal_tensors(np.random.default_rng(5), B=1, N=4, P=P, d=d)
    positions = np.array([[-(2**31), -123456789, 987654321, 2**31 - 1]], dtype=dtype)
    config = AttentionConfig(rope=rope, rope_theta=theta)
    case = Case(tensors, config, {"positions": positions})
    actual, expected = case.stages(), attention_precise(**case.arguments())
    steps = np.repeat(positions[0].astype(np.float64), P) * (P if rope == "virtual" else 1)
    angles = (np.abs(steps)[:, None] + P) * theta ** (-2 * (np.arange(d) % (d // 2)) / d)
    allowed = (4 * DOUBLE_ROUNDOFF * angles + 1e-14)[None, :, None, :]
    sizes = magnitudes(case, expected)
    for name in ("rotated_q", "rotated_k"):
        assert np.all(np.abs(actual[name] - expected[name]) <= allowed * sizes[name])


@pytest.mark.requirement("ROPE-5")
@pytest.mark.parametrize("d", [4, 6, 64, 96, 112, 128])
def test_angle_error_for_every_lane_pair(d: int) -> None:
    """Each pair holds (1, 0), so rotation shows cos φ and sin φ of every frequency."""
    P, theta = 1, 500000.0
    tensors = normal_tensors(np.random.default_rng(19), B=1, N=4, H=1, P=P, d=d, e=1)
    unit = np.repeat([1.0, 0.0], d // 2)
    tensors |= {"q": np.broadcast_to(unit, (1, 4, 1, d)), "alpha_q": np.ones((1, 1, P))}
    positions = np.array([[1001, 393213, 123456789, 2**31 - 1]])
    case = Case(tensors, AttentionConfig(rope="token", rope_theta=theta), {"positions": positions})
    error = case.stages()["rotated_q"] - attention_precise(**case.arguments())["rotated_q"]
    angles = positions[0][:, None] * theta ** (-2 * np.arange(d // 2) / d)
    error_of_angle = np.hypot(error[0, :, 0, : d // 2], error[0, :, 0, d // 2 :])
    assert np.all(error_of_angle <= 4 * DOUBLE_ROUNDOFF * (angles + 1))


@pytest.mark.requirement("IDX-2", "MASK-1", "MASK-2")
@pytest.mark.parametrize("causal", ["virtual", "token"])
@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize("P", [2, 3])
def test_masks_at_the_ends_of_the_index_range(causal: Any, as_array: bool, P: int) -> None:
    """In 32 bits, twice the last index would be negative and twice the first would be 0."""
    tensors = normal_tensors(np.random.default_rng(6), B=1, N=2, P=P)
    for offset, sees in ((2**31 - 2, True), (-(2**31), False)):
        given = np.array([offset], dtype=np.int32) if as_array else offset
        case = Case(tensors, AttentionConfig(causal=causal), {"query_offset": given})
        assert np.all(np.isfinite(case.stages()["logits"]) == sees)
        windowed = case.replace(config=AttentionConfig(causal=causal, window=1))
        np.testing.assert_array_equal(windowed.output(), 0.0)


@pytest.mark.requirement("SOFT-1")
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e3, 1e18])
def test_softmax_of_logits_of_any_size(size: float) -> None:
    tensors = normal_tensors(np.random.default_rng(7))
    case = Case({**tensors, "q": size * tensors["q"], "k": size * tensors["k"]}, AttentionConfig(rope="none"))
    actual, expected = case.stages(), attention_loops(**case.arguments())
    assert np.all(np.isfinite(actual["output"]))
    np.testing.assert_allclose(actual["output"], expected["output"], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(actual["lse"], expected["lse"], rtol=1e-12)


# Queries that see nothing, and keys that are not seen


@pytest.mark.requirement("SOFT-2", "SOFT-3", "LIN-1")
@pytest.mark.parametrize("normalisation", NORMALISATION)
@pytest.mark.parametrize("causal", CAUSAL)
def test_queries_that_see_no_key_give_zeros(causal: Any, normalisation: Any) -> None:
    """Element 0 has every key dropped, element 1 has one query without a segment mate, element 2 neither."""
    tensors = normal_tensors(np.random.default_rng(8), B=3, N=4, P=2)
    config = AttentionConfig(causal=causal, normalisation=normalisation)
    key_mask = np.array([[False] * 4, [True] * 4, [True] * 4])
    kv_segment_ids = np.zeros((3, 4), dtype=np.int32)
    segment_ids = kv_segment_ids.copy()
    segment_ids[1, 2] = 7
    plain = Case(tensors, config)
    case = plain.replace(key_mask=key_mask, segment_ids=segment_ids, kv_segment_ids=kv_segment_ids)
    stages = case.stages()
    empty = np.zeros((3, 4), dtype=bool)
    empty[0] = True
    empty[1, 2] = True
    rows = np.repeat(empty, 2, axis=1)
    np.testing.assert_array_equal(stages["virtual_out"][rows], 0.0)
    np.testing.assert_array_equal(stages["output"][empty], 0.0)
    np.testing.assert_allclose(stages["output"][~empty], plain.output()[~empty], rtol=1e-13)
    if normalisation == "softmax":
        assert np.all(np.isneginf(np.swapaxes(stages["lse"], 1, 2)[rows]))
        assert np.all(np.isfinite(np.swapaxes(stages["lse"], 1, 2)[~rows]))


@pytest.mark.requirement("SOFT-2", "MASK-1", "MASK-2")
@pytest.mark.parametrize("causal", ["virtual", "token"])
def test_queries_before_the_first_key_give_zeros(causal: Any) -> None:
    tensors = normal_tensors(np.random.default_rng(9), N=4, M=3)
    output = Case(tensors, AttentionConfig(causal=causal), {"query_offset": -2}).output()
    np.testing.assert_array_equal(output[:, :2], 0.0)
    assert np.all(output[:, 2:] != 0.0)


@pytest.mark.requirement("DIM-2", "SOFT-2")
@pytest.mark.parametrize("normalisation", NORMALISATION)
@pytest.mark.parametrize(("B", "N", "M"), [(0, 2, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0), (0, 0, 0)])
def test_empty_axes(B: int, N: int, M: int, normalisation: Any) -> None:
    tensors = normal_tensors(np.random.default_rng(10), B=B, N=N, M=M, P=2)
    for causal, window in itertools.product(CAUSAL, (None, 1)):
        config = AttentionConfig(causal=causal, window=window, normalisation=normalisation)
        case = Case(tensors, config, {"key_mask": np.ones((B, M), dtype=bool)})
        actual, expected = case.stages(), attention_loops(**case.arguments())
        assert_stages_agree(case, actual, expected, 1e-12)
        np.testing.assert_array_equal(actual["output"], np.zeros((B, N, 2, 3)))


@pytest.mark.requirement("KEY-2", "KEY-3")
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e308])
@pytest.mark.parametrize("normalisation", NORMALISATION)
@pytest.mark.parametrize("rope", ["virtual", "none"])
@pytest.mark.parametrize("causal", CAUSAL)
def test_dropped_keys_and_values_may_hold_anything(
    causal: Any, rope: Any, normalisation: Any, poison: float
) -> None:
    rng = np.random.default_rng(11)
    tensors = normal_tensors(rng, B=3, N=4, M=5, H=3, G=2)
    key_mask = np.array([[1, 0, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 0]], dtype=bool)
    config = AttentionConfig(causal=causal, rope=rope, normalisation=normalisation)
    case = Case(tensors, config, {"key_mask": key_mask})
    keys, values = tensors["k"].copy(), tensors["v"].copy()
    keys[~key_mask] = poison
    values[~key_mask] = poison
    clean = case.stages()
    for arguments in ({"k": keys}, {"v": values}, {"k": keys, "v": values}):
        poisoned = case.replace(**arguments)
        actual = poisoned.stages()
        with np.errstate(all="raise"):
            loops = attention_loops(**poisoned.arguments())
        for name in clean.keys() - {"mixed_k", "mixed_v", "rotated_k"}:
            np.testing.assert_allclose(actual[name], clean[name], rtol=1e-13, atol=1e-13, err_msg=name)
            np.testing.assert_allclose(loops[name], clean[name], rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.requirement("KEY-2", "KEY-3")
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("normalisation", NORMALISATION)
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("causal", CAUSAL)
def test_keys_hidden_otherwise_are_isolated_and_visible_ones_spread(
    causal: Any, window: int | None, normalisation: Any, poison: float
) -> None:
    """The reference isolates non-finite keys hidden by causality, window or segment too.

    SPEC.md asks that of implementations only for keys dropped by key_mask. Where the poisoned token is
    visible, the affected virtual outputs are not finite.
    """
    P = 2
    tensors = normal_tensors(np.random.default_rng(12), B=2, N=6, P=P)
    segment_ids = np.array([[0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1]])
    config = AttentionConfig(causal=causal, window=window, normalisation=normalisation)
    case = Case(tensors, config, {"segment_ids": segment_ids})
    softmax = dataclasses.replace(config, normalisation="softmax")
    visible = np.isfinite(attention_loops(**case.replace(config=softmax).arguments())["logits"][:, 0])
    clean = case.stages()["virtual_out"]
    for token, name in itertools.product((0, 2, 5), ("k", "v")):
        poisoned = tensors[name].copy()
        poisoned[:, token] = poison
        actual = case.replace(**{name: poisoned}).stages()["virtual_out"]
        reached = visible[:, :, token * P : (token + 1) * P].any(axis=-1)
        np.testing.assert_allclose(actual[~reached], clean[~reached], rtol=1e-13, atol=1e-13)
        assert not np.any(np.isfinite(actual[reached])) or (name == "k" and poison == math.inf)


# Identities of SPEC.md 3.6


@pytest.mark.parametrize("seed", range(10))
def test_permuting_source_heads_changes_nothing(seed: int) -> None:
    case = random_case(3000 + seed)
    want = case.output()
    rng = np.random.default_rng(seed)
    for name in "qkv":
        order = rng.permutation(case.tensors[name].shape[2])
        permuted = case.replace(
            **{name: case.tensors[name][:, :, order], f"alpha_{name}": case.tensors[f"alpha_{name}"][order]}
        )
        np.testing.assert_allclose(permuted.output(), want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("argument", ["v", "collapse"])
def test_output_is_linear_in_values_and_collapse(argument: str, seed: int) -> None:
    case = random_case(4000 + seed)
    first = case.tensors[argument]
    second = np.random.default_rng(seed).standard_normal(first.shape)
    combined = case.replace(**{argument: 1.5 * first - 0.25 * second}).output()
    parts = 1.5 * case.output() - 0.25 * case.replace(**{argument: second}).output()
    np.testing.assert_allclose(combined, parts, rtol=1e-11, atol=1e-11)


def rotate(x: Array, positions: Array, theta: float) -> Array:
    """RoPE with half pairing on (..., tokens, heads, d), by complex multiplication."""
    half = x.shape[-1] // 2
    angles = np.asarray(positions, dtype=np.float64)[..., None, None] * theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)


@pytest.mark.requirement("ROPE-1", "POS-1")
@pytest.mark.parametrize("P", [1, 2, 3])
def test_rotation_commutes_with_mixing(P: int) -> None:
    """Rotating tokens at n·P, then mixing, then rotating by p is the rotation of the virtual tokens."""
    N, theta = 5, 100.0
    tensors = normal_tensors(np.random.default_rng(13), N=N, M=N, H=3, G=2, P=P)
    rotated_early = {name: rotate(tensors[name], np.arange(N) * P, theta) for name in "qk"}
    expected = Case(tensors, AttentionConfig(rope_theta=theta)).stages()
    early = Case({**tensors, **rotated_early}, AttentionConfig(rope="none")).stages()
    for name in "qk":
        completed = rotate(early[f"mixed_{name}"], np.tile(np.arange(P), N), theta)
        np.testing.assert_allclose(completed, expected[f"rotated_{name}"], rtol=1e-12, atol=1e-12)


@pytest.mark.requirement("MIX-4")
@pytest.mark.parametrize("normalisation", NORMALISATION)
def test_order_is_irrelevant_without_mask_and_positions(normalisation: Any) -> None:
    rng = np.random.default_rng(14)
    tensors = normal_tensors(rng, N=4, M=6, H=3, G=2, P=3)
    case = Case(tensors, AttentionConfig(causal="none", rope="none", normalisation=normalisation))
    want = case.output()
    tokens, pseudo, queries = rng.permutation(6), rng.permutation(3), rng.permutation(4)
    moved = case.replace(k=tensors["k"][:, tokens], v=tensors["v"][:, tokens])
    np.testing.assert_allclose(moved.output(), want, rtol=1e-11, atol=1e-11)
    renamed = case.replace(alpha_k=tensors["alpha_k"][..., pseudo], alpha_v=tensors["alpha_v"][..., pseudo])
    np.testing.assert_allclose(renamed.output(), want, rtol=1e-11, atol=1e-11)
    relabelled = case.replace(
        alpha_q=tensors["alpha_q"][..., pseudo], collapse=tensors["collapse"][..., pseudo]
    )
    np.testing.assert_allclose(relabelled.output(), want, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(
        case.replace(q=tensors["q"][:, queries]).output(), want[:, queries], rtol=1e-11
    )


@pytest.mark.requirement("COL-1", "COL-2")
@pytest.mark.parametrize("seed", range(5))
def test_per_head_collapse_is_a_restriction(seed: int) -> None:
    tensors = normal_tensors(np.random.default_rng(seed), H=3, per_head=True)
    per_head = Case(tensors, AttentionConfig())
    embedded = np.eye(3)[:, :, None] * tensors["collapse"]
    np.testing.assert_allclose(
        per_head.replace(collapse=embedded).output(), per_head.output(), rtol=1e-13, atol=1e-13
    )


# Multi-head attention inside the operation


def multi_head_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool,
    window: int | None = None,
    position_step: int | None = None,
    theta: float = 500000.0,
    scale: float | None = None,
) -> Array:
    """Softmax attention of each head by itself; the queries are the last N of the M tokens.

    Args:
        window: tokens within reach, own included; to both sides unless causal.
        position_step: RoPE rotates token n at n·position_step; None for no rotation.
    """
    N, M, d = q.shape[1], k.shape[1], q.shape[3]
    queries, keys = np.arange(M - N, M), np.arange(M)
    if position_step is not None:
        q, k = rotate(q, queries * position_step, theta), rotate(k, keys * position_step, theta)
    distance = queries[:, None] - keys[None, :]
    visible = np.ones((N, M), dtype=bool)
    if causal:
        visible &= distance >= 0
    if window is not None:
        visible &= np.abs(distance) < window
    logits = np.einsum("bnhj,bmhj->bhnm", q, k) * (1 / math.sqrt(d) if scale is None else scale)
    weights = np.where(visible, np.exp(logits), 0.0)
    output: Array = np.einsum("bhnm,bmhj->bnhj", weights / weights.sum(axis=-1, keepdims=True), v)
    return output


Collapse = Literal["average", "first", "last"]
COLLAPSES: tuple[Collapse, ...] = ("average", "first", "last")


def replicated(tensors: dict[str, Array], collapse: Collapse, *, per_head: bool = False) -> dict[str, Array]:
    """The tensors with every pseudo-head a copy of its head, and one of the three collapses to it."""
    H, _, P = tensors["alpha_q"].shape
    copies = np.repeat(np.eye(H)[:, :, None], P, axis=2)
    r = {"average": np.full(P, 1 / P), "first": np.eye(P)[0], "last": np.eye(P)[-1]}[collapse]
    R = np.tile(r, (H, 1)) if per_head else np.eye(H)[:, :, None] * r
    return {**tensors, "alpha_q": copies, "alpha_k": copies, "alpha_v": copies, "collapse": R}


def assert_equal_or_far(actual: Array, expected: Array, equal: bool) -> None:
    error = np.max(np.abs(actual - expected))
    assert error <= 1e-12 if equal else error > 0.05, error


INCLUSION: dict[tuple[str, str], tuple[Collapse, ...]] = {
    ("virtual", "virtual"): (),
    ("virtual", "token"): ("last",),
    ("virtual", "none"): ("last",),
    ("token", "virtual"): (),
    ("token", "token"): COLLAPSES,
    ("token", "none"): COLLAPSES,
    ("none", "virtual"): (),
    ("none", "token"): COLLAPSES,
    ("none", "none"): COLLAPSES,
}
"""Collapses that turn copied pseudo-heads into multi-head attention, by causal and rope (ERRATA.md, 2)."""

WINDOWED_INCLUSION: dict[tuple[str, str], tuple[Collapse, ...]] = {
    ("virtual", "virtual"): ("last",),
    ("virtual", "token"): ("last",),
    ("token", "virtual"): ("last",),
    ("token", "token"): COLLAPSES,
    ("none", "virtual"): (),
    ("none", "token"): COLLAPSES,
}
"""The same under a window, with rope "token", by causal and window_unit."""


@pytest.mark.requirement("PROF-2")
@pytest.mark.parametrize("collapse", COLLAPSES)
@pytest.mark.parametrize(("causal", "rope"), INCLUSION)
@pytest.mark.parametrize("P", [2, 3])
def test_inclusion_of_multi_head_attention(causal: Any, rope: Any, collapse: Collapse, P: int) -> None:
    tensors = replicated(normal_tensors(np.random.default_rng(15), P=P), collapse)
    output = Case(tensors, AttentionConfig(causal=causal, rope=rope)).output()
    steps = {"virtual": (1, P), "token": (1,), "none": (None,)}[rope]
    for step in steps:
        plain = multi_head_attention(
            *(tensors[name] for name in "qkv"), causal=causal != "none", position_step=step
        )
        assert_equal_or_far(output, plain, collapse in INCLUSION[causal, rope])


@pytest.mark.requirement("PROF-2", "WIN-1", "WIN-2", "WIN-3")
@pytest.mark.parametrize("collapse", COLLAPSES)
@pytest.mark.parametrize(("causal", "unit"), WINDOWED_INCLUSION)
@pytest.mark.parametrize("P", [2, 3])
def test_inclusion_of_windowed_attention(causal: Any, unit: Any, collapse: Collapse, P: int) -> None:
    tensors = replicated(normal_tensors(np.random.default_rng(16), P=P), collapse)
    config = AttentionConfig(causal=causal, rope="token", window=2, window_unit=unit)
    plain = multi_head_attention(
        *(tensors[name] for name in "qkv"), causal=causal != "none", window=2, position_step=1
    )
    assert_equal_or_far(Case(tensors, config).output(), plain, collapse in WINDOWED_INCLUSION[causal, unit])


@pytest.mark.requirement("PROF-1", "PROF-2")
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("collapse", COLLAPSES)
@pytest.mark.parametrize("window", [None, 1, 2, WIDE_WINDOW])
@pytest.mark.parametrize("P", [1, 2, 4])
def test_profile_mha_preserving(P: int, window: int | None, collapse: Collapse, per_head: bool) -> None:
    config = dataclasses.replace(PROFILES["mha-preserving"].config, window=window)
    tensors = replicated(
        normal_tensors(np.random.default_rng(17), N=4, M=6, H=3, P=P), collapse, per_head=per_head
    )
    plain = multi_head_attention(
        *(tensors[name] for name in "qkv"), causal=True, window=window, position_step=1
    )
    np.testing.assert_allclose(Case(tensors, config).output(), plain, rtol=1e-12, atol=1e-12)


# The corrected witness that pseudo-heads compute more than multi-head attention


@pytest.mark.requirement("PROF-1")
@pytest.mark.parametrize(
    ("alpha_v", "factor"),
    [
        ([1.0, 0.0], lambda s: 1 / (1 + np.exp(-2 * s))),
        ([1.0, -1.0], np.tanh),
        ([1.0, 1.0], np.ones_like),
    ],
)
@pytest.mark.parametrize("size", [0.5, 1.0, 2.0])
def test_corrected_witness(alpha_v: list[float], factor: Any, size: float) -> None:
    """Equal tokens and opposite pseudo-heads give a nonlinear function of the token (ERRATA.md, 12).

    On equal tokens multi-head attention is linear in the token, and so is the witness as printed, whose
    two pseudo-values are the same ([1, 1], the last row).
    """
    rng = np.random.default_rng(18)
    d, N = 4, 3
    x = size * rng.standard_normal(d)
    W_q, W_k, W_v = rng.standard_normal((3, d, d))

    def tokens(vector: Array) -> Array:
        return np.broadcast_to(vector, (1, N, 1, d))

    opposite = np.array([[[1.0, -1.0]]])
    tensors = {
        "q": tokens(x @ W_q),
        "k": tokens(x @ W_k),
        "v": tokens(x @ W_v),
        "alpha_q": opposite,
        "alpha_k": opposite,
        "alpha_v": np.array([[alpha_v]]),
        "collapse": np.array([[[1.0, 0.0]]]),
    }
    s = (x @ W_q) @ (x @ W_k) / math.sqrt(d)
    expected = factor(s) * (x @ W_v)
    output = Case(tensors, PROFILES["theory"].config).output()
    np.testing.assert_allclose(output, tokens(expected), rtol=1e-12, atol=1e-12)
