"""Calls of the operation that the tests of every backend share, as NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from iha_conformance.judge import compare
from iha_core import AttentionConfig
from iha_core.bounds import derive_limits

Call = dict[str, Any]
"""Arguments by name, `config` included."""

FLOATS = ("q", "k", "v", "alpha_q", "alpha_k", "alpha_v", "collapse")


def random_call(seed: int) -> Call:
    """Every argument and every field of the configuration drawn at random, sizes of 0 included."""
    rng = np.random.default_rng([20260221, seed])

    def pick(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    def integers(low: int, high: int, *shape: int) -> np.ndarray[Any, Any]:
        return rng.integers(low, high, shape).astype(pick(np.int8, np.int32, np.int64))

    config = AttentionConfig(
        causal=pick("virtual", "token", "none"),
        window=pick(None, None, 1, 2, 3, 8),
        window_unit=pick("virtual", "token"),
        rope=pick("virtual", "token", "none"),
        rope_theta=pick(500000.0, 10.0),
        rope_pairing=pick("half", "adjacent"),
        scale=pick(None, 0.7),
        normalisation=pick("softmax", "softmax", "none"),
    )
    B, N, M = (int(size) for size in rng.integers([1, 1, 1], [3, 6, 6]))
    if seed % 8 == 0:
        B, N, M = pick((0, N, M), (B, 0, M), (B, N, 0), (B, 0, 0))
    H, G, P, e = (int(size) for size in rng.integers(1, [4, 4, 4, 5]))
    d = pick(2, 4, 6) if config.rope != "none" else pick(1, 3, 4)
    normal = rng.standard_normal
    call: Call = {
        "q": normal((B, N, H, d)),
        "k": normal((B, M, G, d)),
        "v": normal((B, M, G, e)),
        "alpha_q": normal((H, H, P)),
        "alpha_k": normal((G, H, P)),
        "alpha_v": normal((G, H, P)),
        "collapse": normal(pick((H, H, P), (H, P))),
        "config": config,
    }
    if pick(True, False):
        call["key_mask"] = rng.random((B, M)) < 0.6
    for ids, low, high in (("segment_ids", 0, 2), ("positions", -100, 100)):
        if pick(True, False):
            call[ids] = integers(low, high, B, N)
            if N != M or pick(True, False):
                call[f"kv_{ids}"] = integers(low, high, B, M)
    offset = pick(None, "int", "()", "(B,)")
    if offset == "int":
        call["query_offset"] = int(rng.integers(-3, 7))
    elif offset is not None:
        call["query_offset"] = integers(-3, 7, *((B,) if offset == "(B,)" else ()))
    return call


def plain_call(
    B: int = 2,
    N: int = 3,
    M: int = 3,
    H: int = 2,
    G: int = 2,
    P: int = 2,
    d: int = 4,
    e: int = 3,
    **options: Any,
) -> Call:
    """Normal tensors of the given sizes, the default configuration, and the options given."""
    rng = np.random.default_rng(20260221)
    shapes = {
        "q": (B, N, H, d),
        "k": (B, M, G, d),
        "v": (B, M, G, e),
        "alpha_q": (H, H, P),
        "alpha_k": (G, H, P),
        "alpha_v": (G, H, P),
        "collapse": (H, H, P),
    }
    tensors = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    return {**tensors, "config": AttentionConfig(), **options}


def bare_call(q: Any, k: Any, v: Any, **config: Any) -> Call:
    """Plain attention of one head with one pseudo-head: q (N, d), k (M, d), v (M, e); causal "none"."""
    one = np.ones((1, 1, 1))
    arrays = {
        name: np.asarray(x, dtype=np.float64)[None, :, None] for name, x in zip("qkv", (q, k, v), strict=True)
    }
    fields = {"causal": "none", "rope": "none", "scale": 1.0, **config}
    mixing = dict.fromkeys(FLOATS[3:], one)
    return {**arrays, **mixing, "config": AttentionConfig(**fields)}


def convert(call: Call, array: Callable[[np.ndarray[Any, Any]], Any]) -> Call:
    """The call with every NumPy array replaced by `array` of it."""
    return {name: array(x) if isinstance(x, np.ndarray) else x for name, x in call.items()}


def assert_conforms(stages: dict[str, Any], call: Call, storage: str = "float64") -> None:
    """Every stage is within half of its limit, as a conforming one must be ([NUM-4]).

    The call holds NumPy arrays of values of the storage dtype.
    """
    limits = derive_limits(**call, storage=storage)
    for name, found in stages.items():
        outcome = compare(name, found, limits.stages[name], limits.limits[name], storage=storage)
        assert outcome.passed, outcome.reason
        assert outcome.ratio is not None
        assert outcome.ratio <= 0.5, name


# Answers that are exact in every dtype, of one head and one pseudo-head: call, and output (N, e)

_SIGNS = (np.arange(1000)[:, None] >> np.arange(16) & 1) * 2.0 - 1  # (1000, 16), rows all different
_SPELLED = (np.arange(1000) * 7 % 251 + 1)[:, None]
EXACT: dict[str, tuple[Call, Any]] = {
    # One logit is at least 128 above all others; no value is 0, to which those would add.
    "one-hot": (bare_call(64 * _SIGNS, _SIGNS, _SPELLED), _SPELLED),
    "4096 equal keys": (
        bare_call(np.zeros((2, 16)), np.zeros((4096, 16)), np.where(np.arange(4096) % 2, 15, 1)[:, None]),
        [[8], [8]],
    ),
    # Scaled, the logits are 262144: beyond float16.
    "overflow": (
        bare_call(np.full((1, 16), 256), np.full((4, 16), 256), [[1, 0], [2, 4], [3, 0], [2, 4]], scale=None),
        [[2, 2]],
    ),
    # The logits are 257 and 256, one number to bfloat16.
    "linear": (bare_call([[1, 1]], [[256, 1], [256, 0]], [[1], [-1]], normalisation="none"), [[1]]),
    "one key": (bare_call([[3]], [[5]], [[7, 9]]), [[7, 9]]),
}


def call_of_scale(scale: float, causal: Any = "virtual", normalisation: Any = "softmax") -> Call:
    """Random data for a scale that float32 may not hold: it does hold the products, scaled and unscaled."""
    config = AttentionConfig(causal=causal, scale=scale, normalisation=normalisation)
    call = plain_call(N=40, M=40, d=4, e=4, config=config)
    for name in ("q", "k"):
        size = min(max(scale**-0.5, 1e-17), 1e17)
        call[name] = (size * call[name]).astype(np.float32).astype(np.float64)
    for name in ("v", *FLOATS[3:]):
        call[name] = call[name].astype(np.float32).astype(np.float64)
    return call


SCALES = (1e-50, 1e-39, 1e-37, 3.0, 1e38, 1e39)


def with_value_width(call: Call, expected: Any, width: int) -> tuple[Call, np.ndarray[Any, Any]]:
    """Values and answer repeated or cut to a width: kernels may differ between e = d and e != d."""

    def resize(x: Any) -> np.ndarray[Any, Any]:
        x = np.asarray(x, dtype=np.float64)
        return x[..., np.arange(width) % x.shape[-1]]

    return {**call, "v": resize(call["v"])}, resize(expected)


# Bad input: how it departs from `plain_call()`

Change = Callable[[Call], Call]


def _set(**arguments: Any) -> Change:
    return lambda call: {**call, **arguments}


def _cast(dtype: Any, *names: str) -> Change:
    return lambda call: {**call, **{name: call[name].astype(dtype) for name in names}}


def _cut(name: str, *index: Any) -> Change:
    return lambda call: {**call, name: call[name][index]}


_IDS = np.zeros((2, 3), dtype=np.int64)
BAD_INPUTS: dict[str, Change] = {
    "rank": _cut("q", 0),
    "batch": _cut("k", slice(1)),
    "head width": _cut("k", ..., slice(2)),
    "value tokens": _cut("v", slice(None), slice(2)),
    "no head": _cut("k", slice(None), slice(None), slice(0)),
    "odd head width": lambda call: _cut("k", ..., slice(3))(_cut("q", ..., slice(3))(call)),
    "mixing axes": _cut("alpha_k", slice(1)),
    "no pseudo-head": _cut("alpha_q", ..., slice(0)),
    "collapse rank": _cut("collapse", 0, 0),
    "collapse size": _cut("collapse", slice(1)),
    "integer queries": _cast(np.int64, "q"),
    "mixed storage": _cast(np.float32, "v"),
    "narrow parameters": _cast(np.float32, *FLOATS[3:]),
    "mixed parameters": _cast(np.float32, "collapse"),
    "list": _set(k=[1.0]),
    "None": _set(alpha_v=None),
    "integer key mask": _set(key_mask=_IDS),
    "key mask shape": _set(key_mask=np.ones((2, 4), dtype=np.bool_)),
    "boolean ids": _set(segment_ids=_IDS > 0),
    "float positions": _set(positions=_IDS * 1.0),
    "ids as a list": _set(segment_ids=[[0, 0, 0]] * 2),
    "kv ids alone": _set(kv_segment_ids=_IDS),
    "kv positions alone": _set(kv_positions=_IDS),
    "ids need N = M": lambda call: {**_cut("q", slice(None), slice(2))(call), "segment_ids": _IDS[:, :2]},
    "offset float": _set(query_offset=1.0),
    "offset bool": _set(query_offset=True),
    "offset range": _set(query_offset=2**31),
    "offset dtype": _set(query_offset=np.zeros(2)),
    "offset shape": _set(query_offset=np.zeros(3, dtype=np.int64)),
    "config": _set(config={"causal": "virtual"}),
}
