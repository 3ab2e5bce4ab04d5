"""Ports that speak other dialects of the operation, for the tests of `iha diagnose`.

`speaker` speaks any dialect, one value on each axis of the design; it also makes the mistakes in
`FAULTS`, which belong to none. `DIALECTS` holds ports written after those that are public, each by
itself. Nothing here shares code with the kit's own model of dialects.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from iha_conformance.protocol import Job, Result, TargetInfo
from iha_conformance.targets.callables import CallableAdapter
from iha_conformance.targets.messages import Adapter
from iha_conformance.targets.worker import run_job
from iha_core import AttentionConfig

Array = np.ndarray[Any, Any]
Inputs = dict[str, Any]
Port = Callable[[Inputs, dict[str, Any]], Any]
Axes = Mapping[str, Any]

MIXING = tuple(map(",".join, itertools.permutations(("source", "target", "pseudo"))))
COLLAPSING = tuple(map(",".join, itertools.permutations(("out", "source", "pseudo"))))

VALUES: Mapping[str, tuple[Any, ...]] = {
    "alpha_q_axes": MIXING,
    "alpha_k_axes": MIXING,
    "alpha_v_axes": MIXING,
    "collapse_axes": COLLAPSING,
    "collapse_kind": ("global", "per_head", "mean", "first", "last", "sum"),
    "order": ("token_major", "pseudo_major", "reshaped", "extra_heads"),
    "causal": ("virtual", "token", "none"),
    "window_unit": ("virtual", "token"),
    "rope": ("virtual", "token", "none"),
    "rope_pairing": ("half", "adjacent"),
    "rope_theta": (500000.0, 10000.0, 100.0),
    "scale": (None, 0.5, 1.0),
    "normalisation": ("softmax", "none"),
    "window_bound": ("exclusive", "inclusive"),
    "rope_sign": (1, -1),
    "rope_when": ("after", "before"),
    "qk_norm": ("none", "before_mix", "after_mix"),
    "qk_multiplier": (1.0, 1.2),
    "alignment": ("last", "first"),
    "key_mask": ("keep", "drop"),
    "values": ("mixed", "unmixed"),
}
"""Values to try on each axis, canonical first; a scale of None is 1/sqrt(d)."""

CANONICAL = {axis: values[0] for axis, values in VALUES.items()}

FIELDS = tuple(field for field in AttentionConfig().to_dict() if field != "window")
"""Fields of the configuration that are axes."""

FAULTS: Mapping[str, str] = {
    **{
        f"two percent {stage}": stage
        for stage in ("mixed_q", "mixed_k", "mixed_v", "rotated_q", "rotated_k", "logits", "virtual_out")
    },
    "two percent output": "output",
    **{f"summed source {x}": f"mixed_{x}" for x in "qkv"},
    **{f"missing transpose {x}": f"mixed_{x}" for x in "qkv"},
    **{f"softmaxed alpha_{x}": f"mixed_{x}" for x in "qkv"},
    **{f"unrotated {x}": f"rotated_{x}" for x in "qk"},
    "wrapped table": "rotated_q",
    "one-sided window": "logits",
    "causal window": "logits",
    "two windows": "logits",
    "tiled key mask": "logits",
    "weights of another head": "virtual_out",
    "noise": "output",
    "zeros": "output",
}
"""Mistakes that no dialect has, and the first stage that shows each."""

ONLY_WITHOUT_CAUSALITY = frozenset({"one-sided window", "causal window"})
"""Mistakes that are right under either causal kind."""

_noise = np.random.default_rng(20260221)


# Targets


class InProcess:
    """A target that runs in this process, without a time limit."""

    takes_all = False

    def __init__(self, port: Port | Adapter) -> None:
        is_adapter = hasattr(port, "detailed")
        self._adapter: Any = port if is_adapter else CallableAdapter("tests:port", port, frozenset())

    @property
    def info(self) -> TargetInfo:
        return self._adapter.info

    @property
    def capabilities(self) -> frozenset[str]:
        return self._adapter.capabilities

    def evaluate(self, jobs: Iterable[Job]) -> Iterator[Result]:
        for job in jobs:
            yield run_job(self._adapter, job)

    def close(self) -> None:
        pass


# Any dialect


def speaker(
    *,
    stages: bool = False,
    heeds: tuple[str, ...] = (),
    deaf: tuple[str, ...] = (),
    refuses: tuple[str, ...] = (),
    strict: bool = False,
    fault: str | None = None,
    **axes: Any,
) -> Port:
    """A port that speaks the dialect with these values on its axes, canonical ones where not given.

    Of the configuration it reads the window only.

    Args:
        stages: give all stages, rows in the port's own order.
        heeds: fields of the configuration that it follows after all, whatever the axis says.
        deaf: "window", "key_mask": what it takes and ignores.
        refuses: what it raises a ValueError for, see `_refuse`.
        strict: refuse every configuration but its own.
        fault: one of `FAULTS`.
        axes: values by axis.
    """
    if unknown := {*axes} - {*CANONICAL} | {*heeds} - {*FIELDS} | ({fault} - {None, *FAULTS}):
        raise TypeError(f"no such axis, field or fault: {unknown}")
    own = CANONICAL | axes

    def port(inputs: Inputs, config: dict[str, Any]) -> Any:
        says = own | {field: config[field] for field in heeds}
        if strict and any(config[field] != says[field] for field in FIELDS):
            raise NotImplementedError("not configurable")
        _refuse(refuses, inputs, config, says)
        window = None if "window" in deaf else config["window"]
        heard = {name: value for name, value in inputs.items() if name not in deaf}
        found = _speak(heard, window, says, fault)
        return found if stages else found["output"]

    return port


def _refuse(refuses: tuple[str, ...], inputs: Inputs, config: dict[str, Any], says: Axes) -> None:
    pseudo = inputs["alpha_q"].shape[says["alpha_q_axes"].split(",").index("pseudo")]
    met = {
        "P > 1": pseudo > 1,
        "G != H": inputs["k"].shape[2] != inputs["q"].shape[2],
        "N != M": inputs["k"].shape[1] != inputs["q"].shape[1],
        "3-D collapse": inputs["collapse"].ndim == 3,
        "2-D collapse": inputs["collapse"].ndim == 2,
        "key_mask": "key_mask" in inputs,
        "window": config["window"] is not None,
    }
    for what in refuses:
        if met[what]:
            raise ValueError(f"this port does not take: {what}")


def _speak(inputs: Inputs, window: int | None, says: Axes, fault: str | None) -> dict[str, Array]:
    """All stages; arrays between mixing and rows are (B, tokens, H, P, width)."""
    if unknown := {*inputs} & {"segment_ids", "kv_segment_ids", "positions", "kv_positions"}:
        raise NotImplementedError(f"no {', '.join(sorted(unknown))}")
    q, k, v = (inputs[x].astype(np.float64) for x in "qkv")
    (B, N, H, d), M = q.shape, k.shape[1]
    alpha_q = _read(inputs["alpha_q"], says["alpha_q_axes"], H, H, None)
    P = alpha_q.shape[2]
    alpha_k = _read(inputs["alpha_k"], says["alpha_k_axes"], k.shape[2], H, P)

    offset = inputs.get("query_offset")
    if offset is None:
        offset = M - N if says["alignment"] == "last" else 0
    offset = np.broadcast_to(offset, (B,))[:, None]
    no_offset = np.zeros((B, 1), dtype=np.int64)

    def before(x: Array, shift: Array) -> Array:
        if says["qk_norm"] == "before_mix":
            x = says["qk_multiplier"] * _norm(x)
        if says["rope_when"] == "before" and says["rope"] != "none":
            token = np.arange(x.shape[1]) + shift
            x = _rotate(x, token * P if says["rope"] == "virtual" else token, says)
        return x

    def after(path: str, x: Array, index: Array, token: Array) -> Array:
        if says["qk_norm"] == "after_mix":
            x = _norm(x)
        if says["qk_norm"] != "before_mix":
            x = says["qk_multiplier"] * x
        if says["rope_when"] == "after" and says["rope"] != "none":
            position = index if says["rope"] == "virtual" else token
            position = position * (fault != f"unrotated {path}")
            x = _rotate(x, position % M if fault == "wrapped table" else position, says)
        return x

    def hurt(stage: str, x: Array, head_axis: int = 2) -> Array:
        if fault == f"two percent {stage}":
            x = x.copy()
            np.moveaxis(x, head_axis, 0)[0] *= 1.02
        found[stage] = x
        return x

    found: dict[str, Array] = {}
    mixed_q = hurt("mixed_q", _rows(_mix(before(q, offset), alpha_q, "q", fault), "q", says, fault))
    mixed_k = hurt("mixed_k", _rows(_mix(before(k, no_offset), alpha_k, "k", fault), "k", says, fault))
    if says["values"] == "mixed":
        alpha_v = _read(inputs["alpha_v"], says["alpha_v_axes"], v.shape[2], H, P)
        pseudo_v = _mix(v, alpha_v, "v", fault)
    elif v.shape[2] != H:
        raise ValueError(f"unmixed values: expected H={H} heads, got {v.shape[2]}")
    else:
        pseudo_v = np.repeat(v[:, :, :, None], P, axis=3)
    mixed_v = hurt("mixed_v", _rows(pseudo_v, "v", says, fault))

    index_q, token_q, p_q = _indices(N, P, offset, says)
    index_k, token_k, p_k = _indices(M, P, no_offset, says)
    rotated_q = hurt("rotated_q", after("q", mixed_q, index_q, token_q))
    rotated_k = hurt("rotated_k", after("k", mixed_k, index_k, token_k))

    # Visibility, (B, heads or 1, T, S)
    virtual = (index_q[:, :, None] - index_k[:, None, :])[:, None]
    tokens = (token_q[:, :, None] - token_k[:, None, :])[:, None]
    visible = np.ones_like(virtual, dtype=bool)
    if says["causal"] != "none":
        visible &= (virtual if says["causal"] == "virtual" else tokens) >= 0
    if window is not None:
        distance = virtual if says["window_unit"] == "virtual" else tokens
        if says["causal"] == "none" and fault not in ("one-sided window", "causal window"):
            distance = abs(distance)
        if fault == "causal window":
            visible &= tokens >= 0
        reach = window * P if says["window_unit"] == "virtual" else window
        within = distance <= reach if says["window_bound"] == "inclusive" else distance < reach
        if fault == "two windows":
            other = distance < reach if says["window_bound"] == "inclusive" else distance <= reach
            within = np.concatenate([within] + [other] * (H - 1), axis=1)
        visible = visible & within
    if says["order"] == "extra_heads":
        visible = visible & (p_q[:, None] == p_k)
    if "key_mask" in inputs:
        allowed = inputs["key_mask"] if says["key_mask"] == "keep" else ~inputs["key_mask"]
        column = np.arange(M * P) % max(M, 1) if fault == "tiled key mask" else token_k[0]
        visible = visible & allowed[:, None, None, column]

    scale = d**-0.5 if says["scale"] is None else says["scale"]
    logits = scale * np.einsum("bthd,bshd->bhts", rotated_q, rotated_k)
    linear = says["normalisation"] == "none"
    logits = hurt("logits", np.where(visible, logits, 0.0 if linear else -np.inf), head_axis=1)
    weights = logits
    if not linear:
        top = logits.max(axis=-1, keepdims=True, initial=-np.inf)
        power = np.exp(logits - np.where(np.isfinite(top), top, 0.0))
        total = power.sum(axis=-1, keepdims=True)
        seeing = total > 0
        weights = power / np.where(seeing, total, 1.0)
        found["lse"] = np.where(seeing, top + np.log(np.where(seeing, total, 1.0)), -np.inf)[..., 0]
    if fault == "weights of another head":
        weights = np.roll(weights, 1, axis=1)
    virtual_out = hurt("virtual_out", np.einsum("bhts,bshe->bthe", weights, mixed_v))

    output = hurt("output", _collapse(_tokens(virtual_out, P, says), inputs["collapse"], says))
    if fault == "noise":
        output = output + 0.05 * abs(output).max(initial=0.0) * _noise.standard_normal(output.shape)
    elif fault == "zeros":
        output = np.zeros_like(output)
    found["output"] = output.astype(inputs["q"].dtype)
    return found


def _read(tensor: Array, order: str, source: int, target: int, pseudo: int | None) -> Array:
    """A mixing tensor whose axes are stored in that order, as [source, target, pseudo]."""
    stored = order.split(",")
    tensor = tensor.astype(np.float64).transpose([stored.index(a) for a in ("source", "target", "pseudo")])
    expected = (source, target, tensor.shape[2] if pseudo is None else pseudo)
    if tensor.shape != expected:
        raise ValueError(f"mixing tensor: expected {expected} as {order}, got {tensor.shape}")
    return tensor


def _norm(x: Array) -> Array:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def _rotate(x: Array, position: Array, says: Axes) -> Array:
    """x (B, rows, heads, d) by the angles of position (B, rows)."""
    d = x.shape[-1]
    if d % 2:
        raise ValueError(f"rope: expected an even head width, got {d}")
    i = np.arange(d // 2)
    angle = says["rope_sign"] * position[..., None, None] * says["rope_theta"] ** (-2 * i / d)
    first, second = (i, i + d // 2) if says["rope_pairing"] == "half" else (2 * i, 2 * i + 1)
    x1, x2 = x[..., first], x[..., second]
    turned = np.empty_like(x)
    turned[..., first] = x1 * np.cos(angle) - x2 * np.sin(angle)
    turned[..., second] = x2 * np.cos(angle) + x1 * np.sin(angle)
    return turned


def _mix(x: Array, alpha: Array, path: str, fault: str | None) -> Array:
    if fault == f"summed source {path}":  # the letters of a port that takes g for another letter than h
        if x.shape[2] != alpha.shape[1]:
            raise ValueError(f"mixing: expected {alpha.shape[1]} heads, got {x.shape[2]}")
        return np.einsum("bnhw,ghp->bnhpw", x, alpha)
    if fault == f"softmaxed alpha_{path}":
        alpha = np.exp(alpha) / np.exp(alpha).sum(axis=0)
    return np.einsum("bngw,ghp->bnhpw", x, alpha)


def _rows(x: Array, path: str, says: Axes, fault: str | None) -> Array:
    """(B, n, H, P, w) as virtual tokens (B, n*P, H, w)."""
    B, n, H, P, w = x.shape
    if says["order"] == "pseudo_major":
        x = x.transpose(0, 3, 1, 2, 4)
    elif says["order"] != "reshaped" and fault != f"missing transpose {path}":
        x = x.transpose(0, 1, 3, 2, 4)
    return x.reshape(B, n * P, H, w)


def _tokens(x: Array, P: int, says: Axes) -> Array:
    """Back from virtual tokens to (B, n, H, P, w)."""
    B, T, H, w = x.shape
    n = T // P
    if says["order"] == "pseudo_major":
        return x.reshape(B, P, n, H, w).transpose(0, 2, 3, 1, 4)
    if says["order"] == "reshaped":
        return x.reshape(B, n, H, P, w)
    return x.reshape(B, n, P, H, w).transpose(0, 1, 3, 2, 4)


def _indices(n: int, P: int, offset: Array, says: Axes) -> tuple[Array, Array, Array]:
    """Virtual index and token index (B, n*P), and the pseudo index (n*P,) of every row."""
    row = np.arange(n * P)
    token, p = (row % max(n, 1), row // max(n, 1)) if says["order"] == "pseudo_major" else (row // P, row % P)
    return row + offset * P, token + offset, p


def _collapse(x: Array, tensor: Array, says: Axes) -> Array:
    """(B, N, H, P, e) to (B, N, H, e)."""
    H, P = x.shape[2:4]
    kind = says["collapse_kind"]
    if kind in ("mean", "sum"):
        return getattr(np, kind)(x, axis=3)
    if kind in ("first", "last"):
        return x[:, :, :, 0 if kind == "first" else -1]
    axes = [axis for axis in ("out", "source", "pseudo") if tensor.ndim == 3 or axis != "out"]
    stored = [axis for axis in says["collapse_axes"].split(",") if axis in axes]
    R = tensor.astype(np.float64).transpose([stored.index(axis) for axis in axes])
    if R.shape != (H, H, P)[-R.ndim :]:
        raise ValueError(f"collapse: expected {(H, H, P)[-R.ndim :]} as {stored}, got {R.shape}")
    if R.ndim == 3 and kind == "global":
        return np.einsum("ihp,bnhpe->bnie", R, x)
    return np.einsum("hp,bnhpe->bnhe", R if R.ndim == 2 else np.einsum("hhp->hp", R), x)


# What can be told apart


def calls(axes: Axes = CANONICAL) -> Iterator[tuple[Inputs, int | None]]:
    """Arguments, with tensors stored in the order in which the port reads them, and windows.

    They differ in everything that makes some axis matter: windows, key masks, N against M, H against P.
    """
    axes = CANONICAL | axes
    sizes = [
        (4, 4, 3, 3, 3),
        (3, 5, 3, 3, 3),
        (4, 4, 2, 2, 3),
        (5, 3, 3, 2, 2),
        (5, 5, 3, 3, 1),
        (3, 5, 3, 2, 1),
    ]
    for number, (N, M, H, G, P) in enumerate(sizes):
        normal = np.random.default_rng(number).standard_normal
        length = {"source": H, "target": H, "out": H, "pseudo": P}
        of_keys = length | {"source": G}
        inputs = {"q": normal((2, N, H, 4)), "k": normal((2, M, G, 4)), "v": normal((2, M, G, 3))}
        for name, lengths in (("alpha_q", length), ("alpha_k", of_keys), ("alpha_v", of_keys)):
            inputs[name] = normal([lengths[axis] for axis in axes[f"{name}_axes"].split(",")])
        stored = axes["collapse_axes"].split(",")
        key_mask = np.arange(2 * M).reshape(2, M) % 3 != 1
        for kept in (stored, [axis for axis in stored if axis != "out"]):
            inputs["collapse"] = normal([length[axis] for axis in kept])
            for window in (None, 1, 2):
                yield dict(inputs), window
            for window in (None, 2):
                yield inputs | {"key_mask": key_mask}, window


def answer(port: Port, inputs: Inputs, window: int | None) -> Array | None:
    """What a port gives under the default configuration with this window, or None where it refuses."""
    try:
        return port(inputs, AttentionConfig(window=window).to_dict())
    except (NotImplementedError, TypeError, ValueError):
        return None


def same(left: Array | None, right: Array | None) -> bool:
    if left is None or right is None:
        return left is right
    largest = abs(left[np.isfinite(left)]).max(initial=0.0)
    return bool(np.allclose(left, right, rtol=0, atol=1e-9 * largest))


def alternatives(axes: Axes, axis: str) -> Iterator[Axes]:
    """The dialects that differ on this axis alone; for a number two others stand for all."""
    value = (CANONICAL | axes)[axis]
    if axis == "scale":
        others: Iterable[Any] = (0.5 * 1.3, 0.5 / 1.3) if value is None else (value * 1.3, value / 1.3)
    elif axis in ("rope_theta", "qk_multiplier"):
        others = (value * 1.3, value / 1.3)
    else:
        others = (other for other in VALUES[axis] if other != value)
    for other in others:
        yield {**axes, axis: other}


def jointly_open(axes: Axes, axis: str, possible: Mapping[str, tuple[Any, ...]]) -> bool:
    """Whether another value of an axis, with other possible ones on two more, gives the same function.

    Orders of tensors are left out: they are open alone or not at all. So are calls with N other than M, where
    more than one index is thought of for pseudo-major order.
    """
    asked = [call for call in calls(axes) if call[0]["q"].shape[1] == call[0]["k"].shape[1]]
    says = [answer(speaker(**axes), *call) for call in asked]
    more = [name for name in possible if name != axis and not name.endswith("_axes")]
    for names in itertools.chain.from_iterable(itertools.combinations(more, n) for n in (0, 1, 2)):
        for value, *values in itertools.product(possible[axis], *(possible[name] for name in names)):
            other = {**axes, axis: value, **dict(zip(names, values, strict=True))}
            if value != (CANONICAL | axes)[axis] and all(
                same(said, answer(speaker(**other), *call)) for said, call in zip(says, asked, strict=True)
            ):
                return True
    return False


def silent(axes: Axes, **traits: Any) -> frozenset[str]:
    """Axes on which some other value gives the same function: no call can tell."""
    asked = list(calls(axes))
    given = [answer(speaker(**axes, **traits), *call) for call in asked]

    def equal(other: Axes) -> bool:
        port = speaker(**other, **traits)
        return all(same(one, answer(port, *call)) for one, call in zip(given, asked, strict=True))

    return frozenset(axis for axis in VALUES if any(map(equal, alternatives(axes, axis))))


# Ports after public ones


def port_a(
    config, *, q, k, v, alpha_q, alpha_k, alpha_v, collapse, key_mask=None, mask="token", per_head=True
):
    """PyTorch; masks compared from the first key on, as `tril` does."""
    B, N, H, d = q.shape
    M, P = k.shape[1], alpha_q.shape[-1]
    for alpha in (alpha_q, alpha_k, alpha_v):
        parameter(alpha, H, H, P)

    def pseudo(x, alpha):
        return np.einsum("bnjw,jip->binpw", x, alpha).reshape(B, H, -1, x.shape[-1])

    row, column = np.arange(N * P)[:, None], np.arange(M * P)
    seen = np.ones((N * P, M * P), dtype=bool)
    if mask == "virtual":
        seen = np.tril(seen)
    elif mask == "token":
        seen = column // P <= row // P
    if config["window"]:
        distance = row // P - column // P
        seen = seen & ((abs(distance) if mask == "none" else distance) < config["window"])
    if key_mask is not None:
        seen = seen & np.repeat(key_mask, P, axis=1)[:, None, None]
    heads = sdpa(pseudo(q, alpha_q), pseudo(k, alpha_k), pseudo(v, alpha_v), seen, d**-0.5)
    heads = heads.reshape(B, H, N, P, -1)
    if per_head:
        return np.einsum("hp,bhnpe->bnhe", parameter(collapse, H, P), heads)
    return np.einsum("ihp,bhnpe->bnie", parameter(collapse, H, H, P), heads)


def port_b(config, *, q, k, v, alpha_q, alpha_k, alpha_v, collapse):
    """PyTorch; self-attention only, loops over pseudo-heads, collapse as a linear layer."""
    B, N, H, d = q.shape
    P = alpha_q.shape[-1]
    if k.shape != q.shape:
        raise ValueError("q and k differ in shape")
    mixed = []
    for x, alpha in ((q, alpha_q), (k, alpha_k), (v, alpha_v)):
        parameter(alpha, H, H, P)
        rows = np.stack([np.tensordot(x, alpha[:, :, p], ([2], [0])) for p in range(P)], axis=2)
        mixed.append(rows.reshape(B, N * P, x.shape[-1], H).transpose(0, 3, 1, 2))
    t = np.arange(N * P)
    seen = t[None, :] <= t[:, None]
    if config["window"] is not None:
        seen &= t[:, None] // P - t[None, :] // P < config["window"]
    out = sdpa(*mixed, seen, 1 / np.sqrt(d))
    out = out.reshape(B, H, N, P, -1).transpose(0, 2, 4, 1, 3).reshape(B, N, -1, H * P)
    return (out @ parameter(collapse, H, H, P).reshape(H, H * P).T).transpose(0, 1, 3, 2)


class PortC:
    """PyTorch GPT trainer; rotation of the opposite sign, QK norm after it, times 1.2; deaf to key masks."""

    def __init__(self, mask="virtual", per_head=True):
        self.mask, self.per_head = mask, per_head

    def rotary(self, x):  # (B, T, H, d)
        half = x.shape[-1] // 2
        frequency = 1.0 / 10000.0 ** (np.arange(half) / half)
        angle = np.arange(x.shape[1])[:, None, None] * frequency
        x1, x2 = x[..., :half], x[..., half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([x1 * cos + x2 * sin, x2 * cos - x1 * sin], axis=-1)

    def __call__(self, config, *, q, k, v, alpha_q, alpha_k, alpha_v, collapse, key_mask=None):
        B, N, H, d = q.shape
        P = alpha_q.shape[-1]
        if k.shape[2] != H:
            raise ValueError("grouped heads are not supported with IHA")
        if k.shape[1] != N:
            raise NotImplementedError("IHA has no cache")
        q, k, v = (
            np.einsum("bnjw,jip->bnpiw", x, parameter(alpha, H, H, P)).reshape(B, N * P, H, -1)
            for x, alpha in ((q, alpha_q), (k, alpha_k), (v, alpha_v))
        )
        q, k = (1.2 * rms_norm(self.rotary(x)) for x in (q, k))
        t = np.arange(N * P)
        index = {"virtual": t, "token": t // P, "none": np.zeros_like(t)}[self.mask]
        seen = index[:, None] >= index[None, :]
        if config["window"] is not None:
            distance = t[:, None] // P - t[None, :] // P
            seen &= (abs(distance) if self.mask == "none" else distance) < config["window"]
        y = sdpa(*(x.transpose(0, 2, 1, 3) for x in (q, k, v)), seen, d**-0.5)
        y = y.transpose(0, 2, 1, 3).reshape(B, N, P, H, -1)
        if self.per_head:
            return (y * parameter(collapse, H, P).T[:, :, None]).sum(axis=2)
        return np.einsum("ihp,bnphe->bnie", parameter(collapse, H, H, P), y)


def port_d(config, *, q, k, v, alpha_q, alpha_k, alpha_v, collapse, own_window=False):
    """PyTorch speed-run; mixes within equal numbers of heads, one key more in its window."""
    B, N, H, d = q.shape
    M, P = k.shape[1], alpha_q.shape[2]
    parameter(alpha_k, H, H, P)
    parameter(alpha_v, H, H, P)

    def expand(x, alpha):
        return np.einsum("bnhw,hgp->bgnpw", x, alpha).reshape(B, H, x.shape[1] * P, -1)

    def rope(x):
        angle = np.outer(np.arange(x.shape[2]), 10000.0 ** (-np.arange(0, d, 2) / d))
        spin = (x[..., : d // 2] + 1j * x[..., d // 2 :]) * np.exp(-1j * angle)
        return np.concatenate([spin.real, spin.imag], axis=-1)

    delta = np.arange(N * P)[:, None] - np.arange(M * P)[None, :]
    seen = delta >= 0
    if own_window:
        seen &= delta <= N // (2 * P)
    elif config["window"] is not None:
        seen &= delta <= config["window"] * P
    q, k = (rms_norm(rope(x)) for x in (expand(q, parameter(alpha_q, H, H, P)), expand(k, alpha_k)))
    y = sdpa(q, k, expand(v, alpha_v), seen, d**-0.5).reshape(B, H, N, P, -1)
    return (y * parameter(collapse, H, P)[:, None, :, None]).sum(axis=3).transpose(0, 2, 1, 3)


def port_e(config, *, q, k, v, alpha_q, alpha_k, alpha_v, collapse, key_mask=None, packed=False, norm=False):
    """PyTorch encoder; tensors (out, pseudo, in), two-sided windows that differ between its two paths."""
    B, N, H, d = q.shape
    M, P = k.shape[1], alpha_q.shape[1]
    if k.shape[2] != H:
        raise ValueError("num_kv_heads must equal num_heads")
    if packed and key_mask is not None:
        raise NotImplementedError("packed sequences have no padding")

    def pseudo(x, alpha):  # (B, H, n*P, w)
        mixed = x.transpose(0, 1, 3, 2) @ parameter(alpha, H, P, H).reshape(H * P, H).T
        return mixed.reshape(*x.shape[:2], -1, H, P).transpose(0, 3, 1, 4, 2).reshape(B, H, -1, x.shape[-1])

    def rope(x):
        angle = np.arange(x.shape[2])[:, None] / 500000.0 ** (np.arange(0, d, 2) / d)
        angle = np.concatenate([angle, angle], axis=1)
        rotated_half = np.concatenate([-x[..., d // 2 :], x[..., : d // 2]], axis=-1)
        x = x * np.cos(angle) + rotated_half * np.sin(angle)
        return rms_norm(x) if norm else x

    seen = np.ones((B, 1, N * P, M * P), dtype=bool)
    if config["window"] is not None:
        t, s = np.arange(N * P)[:, None], np.arange(M * P)
        seen &= abs(t - s) <= config["window"] * P if packed else abs(t // P - s // P) <= config["window"]
    if key_mask is not None:
        seen &= np.repeat(key_mask, P, axis=1)[:, None, None]
    y = sdpa(rope(pseudo(q, alpha_q)), rope(pseudo(k, alpha_k)), pseudo(v, alpha_v), seen, d**-0.5)
    y = y.reshape(B, H, N, P, -1)
    return np.einsum("oph,bhnpe->bnoe", parameter(collapse, H, P, H), y)


def port_f(
    config, *, q, k, v, alpha_q, alpha_k, alpha_v, collapse, key_mask=None, sign=1, norm_before_rope=False
):
    """A "lite" port; head mixing (out, in), no pseudo-heads, no collapse, True in the mask is padding."""
    (N, H, d), (M, G) = q.shape[1:], k.shape[1:3]
    if alpha_q.shape[-1] != 1:
        raise ValueError("P > 1 is not supported")
    q = np.einsum("oi,bnid->bond", parameter(alpha_q, H, H, 1)[..., 0], q)
    k = np.einsum("oi,bnid->bond", parameter(alpha_k, H, G, 1)[..., 0], k)
    v = np.einsum("oi,bnid->bond", parameter(alpha_v, H, G, 1)[..., 0], v)

    def rope(x, position):
        angle = sign * position[:, None] * 10000.0 ** (-2.0 * np.arange(d // 2) / d)
        pairs = x.reshape(*x.shape[:-1], d // 2, 2)
        even = pairs[..., 0] * np.cos(angle) - pairs[..., 1] * np.sin(angle)
        odd = pairs[..., 0] * np.sin(angle) + pairs[..., 1] * np.cos(angle)
        return np.stack([even, odd], axis=-1).reshape(x.shape)

    n, m = np.arange(M - N, M), np.arange(M)
    if norm_before_rope:
        q, k = rope(rms_norm(q), n), rope(rms_norm(k), m)
    else:
        q, k = rms_norm(rope(q, n)), rms_norm(rope(k, m))
    seen = m <= n[:, None]
    if config["window"] is not None:
        seen &= n[:, None] - m <= config["window"]
    if key_mask is not None:
        seen = seen & ~key_mask[:, None, None]
    return sdpa(q, k, v, seen, d**-0.5).transpose(0, 2, 1, 3)


def port_g(config, *, q, k, v, alpha_q, alpha_k, alpha_v, collapse, key_mask=None):
    """A patch of a vision-language model; normalised heads are mixed by a matrix (in, pseudo)."""
    N, M, d = q.shape[1], k.shape[1], q.shape[3]
    if {alpha.shape[-1] for alpha in (alpha_q, alpha_k, alpha_v)} != {1}:
        raise ValueError("expected one pseudo-head per head")
    G, H = k.shape[2], q.shape[2]
    parameter(alpha_k, G, H, 1)
    parameter(alpha_v, G, H, 1)

    def mixed(x, alpha):  # (B, n, heads, w) to (B, heads, n, w)
        return (x.swapaxes(2, 3) @ alpha[..., 0]).transpose(0, 3, 1, 2)

    def rope(x):
        phase = np.arange(x.shape[2])[:, None] * 1e6 ** (-np.arange(0, d, 2) / d)
        cos, sin = np.cos(phase), np.sin(phase)
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    seen = np.tril(np.ones((N, M), dtype=bool))
    if config["window"] is not None:
        seen = np.triu(seen, 1 - config["window"])
    if key_mask is not None:
        seen = seen & key_mask[:, None, None]
    q, k = rope(mixed(rms_norm(q), parameter(alpha_q, H, H, 1))), rope(mixed(rms_norm(k), alpha_k))
    return sdpa(q, k, mixed(v, alpha_v), seen, d**-0.5).transpose(0, 2, 1, 3)


def parameter(array: Array, *shape: int) -> Array:
    """A tensor that has to fit the parameter it is loaded into."""
    if array.shape != shape:
        raise ValueError(f"size mismatch: expected {shape}, got {array.shape}")
    return array


def rms_norm(x: Array) -> Array:
    return x / (np.square(x).mean(axis=-1, keepdims=True) + 1e-6) ** 0.5


def sdpa(q: Array, k: Array, v: Array, seen: Array, scale: float) -> Array:
    """What a framework's kernel does; (B, H, T, w), zeros where nothing is seen."""
    scores = np.where(seen, scale * q @ k.swapaxes(-1, -2), -np.inf)
    largest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(largest > -np.inf, largest, 0.0))
    return weights @ v / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)


def behind(port: Callable[..., Array], **options: Any) -> Port:
    """A port behind the harness that its author writes; what it has no argument for is a TypeError."""

    def target(inputs: Inputs, config: dict[str, Any]) -> Array:
        wide = {name: x.astype(np.float64) if x.dtype != bool else x for name, x in inputs.items()}
        return port(config, **wide, **options).astype(inputs["q"].dtype)

    return target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Double:
    """A port and what has to be said of it.

    Attributes:
        axes: values that are not canonical.
        silent: axes on which nothing can be told.
        either: axes on which nothing need be told.
        traits: of the `speaker` that gives the same answers.
    """

    port: Port
    axes: Axes
    silent: frozenset[str]
    either: frozenset[str] = frozenset()
    traits: Axes = dataclasses.field(default_factory=dict)


NO_ROPE = frozenset({"rope_pairing", "rope_theta", "rope_sign", "rope_when"})
PER_HEAD = frozenset({"collapse_kind"})
"""A port that takes (H, P) alone is per-head, though the canonical one reads that tensor alike."""
P_IS_1 = frozenset({"collapse_axes", "collapse_kind", "order", "causal", "window_unit", "rope", "rope_when"})

_A_AXES = {"causal": "token", "window_unit": "token", "rope": "none", "alignment": "first"}
_A = {
    "axes": _A_AXES | {"collapse_kind": "per_head"},
    # Of a collapse (H, P) nobody can say where a third axis would be; without RoPE a token mask leaves
    # nothing that depends on the order within a token.
    "silent": NO_ROPE | {"collapse_axes", "order"},
    "either": PER_HEAD,
    "traits": {"refuses": ("G != H", "3-D collapse")},
}
_B_AXES = {"window_unit": "token", "rope": "none"}
_C_AXES = {
    "window_unit": "token",
    "rope_sign": -1,
    "rope_theta": 10000.0,
    "qk_norm": "after_mix",
    "qk_multiplier": 1.2,
    "collapse_kind": "per_head",
}
_C = {
    "silent": frozenset({"collapse_axes", "alignment", "key_mask"}),
    "either": PER_HEAD,
    "traits": {"refuses": ("G != H", "N != M", "3-D collapse"), "deaf": ("key_mask",)},
}
_D_AXES = {
    "window_bound": "inclusive",
    "rope_sign": -1,
    "rope_theta": 10000.0,
    "qk_norm": "after_mix",
    "collapse_kind": "per_head",
    "alignment": "first",
}
_D_SILENT = frozenset({"collapse_axes", "key_mask"})
_E_AXES = {
    **{f"alpha_{x}_axes": "target,pseudo,source" for x in "qkv"},
    "collapse_axes": "out,pseudo,source",
    "causal": "none",
    "window_unit": "token",
    "window_bound": "inclusive",
    "alignment": "first",
}
_E_TRAITS = {"refuses": ("G != H", "2-D collapse")}
_F_AXES = {
    **{f"alpha_{x}_axes": "target,source,pseudo" for x in "qkv"},
    "collapse_kind": "mean",
    "causal": "token",
    "window_unit": "token",
    "window_bound": "inclusive",
    "rope": "token",
    "rope_pairing": "adjacent",
    "rope_theta": 10000.0,
    "qk_norm": "after_mix",
    "key_mask": "drop",
}
_F = {"silent": P_IS_1, "traits": {"refuses": ("P > 1",)}}

DIALECTS: Mapping[str, Double] = {
    "A": Double(port=behind(port_a), **_A),
    "A-virtual": Double(
        port=behind(port_a, mask="virtual"),
        axes=_A["axes"] | {"causal": "virtual"},
        silent=_A["silent"] - {"order"},
        either=PER_HEAD,
        traits=_A["traits"],
    ),
    "A-none": Double(
        port=behind(port_a, mask="none"),
        axes=_A["axes"] | {"causal": "none"},
        silent=_A["silent"],
        either=PER_HEAD,
        traits=_A["traits"],
    ),
    "A-global": Double(
        port=behind(port_a, per_head=False),
        axes=_A_AXES,
        silent=NO_ROPE | {"order"},
        traits={"refuses": ("G != H", "2-D collapse")},
    ),
    "B": Double(
        port=behind(port_b),
        axes=_B_AXES,
        silent=NO_ROPE | {"alignment", "key_mask"},
        traits={"refuses": ("G != H", "N != M", "2-D collapse", "key_mask")},
    ),
    "C": Double(port=behind(PortC()), axes=_C_AXES, **_C),
    "C-token": Double(port=behind(PortC("token")), axes=_C_AXES | {"causal": "token"}, **_C),
    "C-none": Double(port=behind(PortC("none")), axes=_C_AXES | {"causal": "none"}, **_C),
    "C-global": Double(
        port=behind(PortC(per_head=False)),
        axes=_C_AXES | {"collapse_kind": "global"},
        silent=frozenset({"alignment", "key_mask"}),
        traits={"refuses": ("G != H", "N != M", "2-D collapse"), "deaf": ("key_mask",)},
    ),
    "D": Double(
        port=behind(port_d),
        axes=_D_AXES,
        silent=_D_SILENT,
        either=PER_HEAD,
        traits={"refuses": ("G != H", "3-D collapse", "key_mask")},
    ),
    # A window of its own has no W that its bound could include or not.
    "D-own": Double(
        port=behind(port_d, own_window=True),
        axes=_D_AXES,
        silent=_D_SILENT,
        either=PER_HEAD | {"window_bound"},
    ),
    "E": Double(port=behind(port_e), axes=_E_AXES, silent=frozenset(), traits=_E_TRAITS),
    "E-norm": Double(
        port=behind(port_e, norm=True),
        axes=_E_AXES | {"qk_norm": "after_mix"},
        silent=frozenset(),
        traits=_E_TRAITS,
    ),
    "E-packed": Double(
        port=behind(port_e, packed=True),
        axes=_E_AXES | {"window_unit": "virtual"},
        silent=frozenset({"key_mask"}),
        traits={"refuses": ("G != H", "2-D collapse", "key_mask")},
    ),
    "F": Double(port=behind(port_f), axes=_F_AXES, **_F),
    "F-sign": Double(port=behind(port_f, sign=-1), axes=_F_AXES | {"rope_sign": -1}, **_F),
    "F-before-norm": Double(port=behind(port_f, norm_before_rope=True), axes=_F_AXES, **_F),
    "G": Double(
        port=behind(port_g),
        axes={
            "collapse_kind": "mean",
            "causal": "token",
            "window_unit": "token",
            "rope": "token",
            "rope_theta": 1e6,
            "qk_norm": "before_mix",
            "alignment": "first",
        },
        silent=P_IS_1,
        traits={"refuses": ("P > 1",)},
    ),
}
"""The rows of `ports.md` by their letters, each with what it has as an option beside it."""
