"""Known-wrong ports, one override each: what people really get wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from doubles.port import Array, Port
from iha_conformance.corpus.streams import cast
from iha_core import AttentionConfig, Dims, reference


class _Shifted(Port):
    """Masks computed with a changed rule: bounds of causality and of the window, in their own units."""

    def __init__(self, *args: Any, causal: int = 0, window: int = 0, unit: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.causal_shift, self.window_shift, self.unit = causal, window, unit

    def visible(
        self,
        query_index: NDArray[np.int64],
        key_index: NDArray[np.int64],
        dims: Dims,
        config: AttentionConfig,
        **masks: Any,
    ) -> NDArray[np.bool_]:
        plain = AttentionConfig(causal="none")
        visible = reference.visibility(query_index, key_index, dims, plain, **masks)
        tq = reference.virtual(query_index, dims.P)[:, :, None]
        tk = reference.virtual(key_index, dims.P)[None, None]
        n, m = tq // dims.P, tk // dims.P
        shift = self.causal_shift
        if config.causal == "virtual":
            visible &= tk <= tq + shift
        elif config.causal == "token":
            visible &= m <= n + shift
        if config.window is not None:
            virtual = config.window_unit == "virtual"
            distance = tq - tk if virtual else n - m
            if config.causal == "none":
                distance = np.abs(distance)
            bound = config.window * (dims.P if virtual else 1)
            bound += self.window_shift if self.unit == config.window_unit else 0
            visible &= distance < bound
        return visible


def _config(**changes: Any) -> type[Port]:
    class Changed(Port):
        def change_config(self, config: dict[str, Any]) -> dict[str, Any]:
            return {
                name: changes[name].get(value, value) if name in changes else value
                for name, value in config.items()
            }

    return Changed


class OneSidedWindow(Port):
    def visible(
        self, query_index: Any, key_index: Any, dims: Dims, config: AttentionConfig, **masks: Any
    ) -> Any:
        visible = super().visible(query_index, key_index, dims, config, **masks)
        if config.window is None or config.causal != "none":
            return visible
        no_window = AttentionConfig(causal="none")
        open_ahead = reference.visibility(query_index, key_index, dims, no_window, **masks)
        tq = reference.virtual(query_index, dims.P)[:, :, None]
        return visible | (open_ahead & (reference.virtual(key_index, dims.P) > tq))


class WindowMakesCausal(Port):
    def change_config(self, config: dict[str, Any]) -> dict[str, Any]:
        if config["window"] is not None and config["causal"] == "none":
            config["causal"] = "token"
        return config


class NegativeAngles(Port):
    def angles(self, position: Any, dims: Dims, config: AttentionConfig) -> Array | None:
        angles = super().angles(position, dims, config)
        return None if angles is None else -angles


class Float32Angles(Port):
    def angles(self, position: Any, dims: Dims, config: AttentionConfig) -> Array | None:
        angles = super().angles(position, dims, config)
        return None if angles is None else angles.astype(np.float32).astype(np.float64)


class AlphaAxes(Port):
    """One mixing tensor read with two of its axes exchanged, wherever its shape allows that."""

    def __init__(
        self, *args: Any, tensor: str = "q", axes: tuple[int, int, int] = (1, 0, 2), **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.tensor, self.axes = tensor, axes

    def mix(self, name: str, x: Array, alpha: Array) -> Array:
        exchanged = alpha.transpose(self.axes)
        if name == self.tensor and exchanged.shape == alpha.shape:
            alpha = exchanged
        return super().mix(name, x, alpha)


class CollapseAxes(Port):
    def __init__(self, *args: Any, axes: tuple[int, int, int] = (1, 0, 2), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.axes = axes

    def collapse(self, virtual_out: Array, R: Array) -> Array:
        if R.ndim == 3 and R.transpose(self.axes).shape == R.shape:
            R = R.transpose(self.axes)
        return super().collapse(virtual_out, R)


class PseudoMajor(Port):
    def order(self, x: Array, P: int) -> Array:
        B, T, H, width = x.shape
        return x.reshape(B, T // P, P, H, width).swapaxes(1, 2).reshape(x.shape)

    def unorder(self, x: Array, P: int) -> Array:
        B, T, H, width = x.shape
        return x.reshape(B, P, T // P, H, width).swapaxes(1, 2).reshape(x.shape)


class Reshaped(Port):
    """(N, H, P) read as (N*P, H) without the transposition, undone by the inverse."""

    def order(self, x: Array, P: int) -> Array:
        B, T, H, width = x.shape
        return x.reshape(B, T // P, P, H, width).swapaxes(2, 3).reshape(x.shape)

    def unorder(self, x: Array, P: int) -> Array:
        B, T, H, width = x.shape
        return x.reshape(B, T // P, H, P, width).swapaxes(2, 3).reshape(x.shape)


class AlignedFirst(Port):
    def query_index(self, dims: Dims, offset: Any) -> NDArray[np.int64]:
        return super().query_index(dims, 0 if offset is None else offset)


class ScaleOfNextWidth(Port):
    def scale(self, config: AttentionConfig, dims: Dims) -> float:
        return config.scale if config.scale is not None else (dims.d + 1) ** -0.5


class LargerQK(Port):
    def mix(self, name: str, x: Array, alpha: Array) -> Array:
        return super().mix(name, x, alpha) * (1.01 if name in "qk" else 1.0)


class InvertedKeyMask(Port):
    def change_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        if "key_mask" in inputs:
            inputs["key_mask"] = ~inputs["key_mask"]
        return inputs


class MeanCollapse(Port):
    def collapse(self, virtual_out: Array, R: Array) -> Array:
        H, P = virtual_out.shape[2], R.shape[-1]
        return super().collapse(virtual_out, np.full((H, P), 1 / P))


class LastCollapse(Port):
    def collapse(self, virtual_out: Array, R: Array) -> Array:
        H, P = virtual_out.shape[2], R.shape[-1]
        return super().collapse(virtual_out, np.tile(np.arange(P) == P - 1, (H, 1)).astype(np.float64))


class OneHeadOff(Port):
    def __init__(self, *args: Any, head: int = -1, factor: float = 1.02, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.head, self.factor = head, factor

    def change_output(self, output: Array) -> Array:
        if self.head < output.shape[2]:
            output[:, :, self.head] *= self.factor
        return output


class LastBatchElementReplaced(Port):
    def change_output(self, output: Array) -> Array:
        if len(output) > 1:
            output[-1] = output[0]
        return output


class PseudoHeadsApart(Port):
    def visible(
        self, query_index: Any, key_index: Any, dims: Dims, config: AttentionConfig, **masks: Any
    ) -> Any:
        visible = super().visible(query_index, key_index, dims, config, **masks)
        pseudo_q, pseudo_k = np.arange(dims.T) % dims.P, np.arange(dims.S) % dims.P
        return visible & (pseudo_q[:, None] == pseudo_k[None, :])


class MeanWhereNothingIsSeen(Port):
    def softmax(self, logits: Array) -> tuple[Array, Array]:
        return super().softmax(np.where(np.isinf(logits), -1e30, logits))

    def weighted_sum(self, weights: Array, mixed_v: Array, visible: NDArray[np.bool_]) -> Array:
        return super().weighted_sum(weights, mixed_v, np.ones_like(visible))


class NoMaximum(Port):
    def softmax(self, logits: Array) -> tuple[Array, Array]:
        exponentials = np.exp(np.float32(logits)).astype(np.float64)
        total = exponentials.sum(-1, keepdims=True)
        return exponentials / np.where(total == 0, 1.0, total), np.log(total[..., 0])


class Epsilon(Port):
    """A denominator that is larger by 0.001."""

    def softmax(self, logits: Array) -> tuple[Array, Array]:
        weights, lse = super().softmax(logits)
        with np.errstate(invalid="ignore"):
            largest = np.max(logits, axis=-1, initial=-np.inf)
            total = np.exp(lse - largest)
            return weights * np.nan_to_num(total / (total + 1e-3))[..., None], lse


class LastKeyDropped(Port):
    def visible(
        self, query_index: Any, key_index: Any, dims: Dims, config: AttentionConfig, **masks: Any
    ) -> Any:
        visible = super().visible(query_index, key_index, dims, config, **masks)
        visible[:, :, -1:] = False
        return visible


class SegmentsIgnored(Port):
    def visible(
        self, query_index: Any, key_index: Any, dims: Dims, config: AttentionConfig, **masks: Any
    ) -> Any:
        masks["segment_ids"] = None
        return super().visible(query_index, key_index, dims, config, **masks)


class PositionsForMasks(Port):
    def visible(
        self, query_index: Any, key_index: Any, dims: Dims, config: AttentionConfig, **masks: Any
    ) -> Any:
        return super().visible(self._positions(query_index), key_index, dims, config, **masks)

    def change_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        self._given = inputs.get("positions")
        return inputs

    def _positions(self, query_index: NDArray[np.int64]) -> NDArray[np.int64]:
        return query_index if self._given is None else np.asarray(self._given)


class FirstRowsOffset(Port):
    """The offset of the first batch element used for all."""

    def change_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        offset = inputs.get("query_offset")
        if np.ndim(offset) == 1 and len(offset):
            inputs["query_offset"] = np.full_like(offset, offset[0])
        return inputs


def _without(*names: str) -> type[Port]:
    class Ignoring(Port):
        def change_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in inputs.items() if name not in names}

    return Ignoring


class KeyPositionsIgnored(Port):
    """Keys rotated in index order although they have positions of their own."""

    def change_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        if "kv_positions" in inputs:
            B, M = inputs["kv_positions"].shape
            inputs["kv_positions"] = np.broadcast_to(np.arange(M), (B, M))
        return inputs


class KeySegmentsIgnored(Port):
    """The queries' segment ids used for the keys, repeated or cut to their number."""

    def change_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        if "kv_segment_ids" in inputs:
            inputs["kv_segment_ids"] = np.resize(inputs["segment_ids"], inputs["kv_segment_ids"].shape)
        return inputs


class KeyMaskTiled(Port):
    """The key mask laid over the virtual keys P times, not over the P keys of each token."""

    def visible(
        self, query_index: Any, key_index: Any, dims: Dims, config: AttentionConfig, **masks: Any
    ) -> Any:
        key_mask = masks.pop("key_mask", None)
        visible = super().visible(query_index, key_index, dims, config, **masks)
        return visible if key_mask is None else visible & np.tile(key_mask, dims.P)[:, None]


class ScaleOfValueWidth(Port):
    def scale(self, config: AttentionConfig, dims: Dims) -> float:
        return config.scale if config.scale is not None else dims.e**-0.5


class _Narrow(Port):
    """Sums formed term by term in 16 bits."""

    def added(self, terms: Array) -> Array:
        """Sum over the last axis, rounded after every term."""
        narrow = "bfloat16" if self.dtype == "bfloat16" else "float16"
        total = np.zeros(terms.shape[:-1])
        for i in range(terms.shape[-1]):
            total = cast(total + terms[..., i], narrow).astype(np.float64)
        return total


class NarrowMixing(_Narrow):
    def mix(self, name: str, x: Array, alpha: Array) -> Array:
        terms = np.einsum("bnsw,shp->bnphws", x, alpha)
        B, N, P, H, width, _ = terms.shape
        return self.added(terms).reshape(B, N * P, H, width)


class NarrowProducts(_Narrow):
    def products(self, q: Array, k: Array, scale: float) -> Array:
        return self.added(scale * np.einsum("bthd,bshd->bhtsd", q, k))


class NarrowDenominator(_Narrow):
    def softmax(self, logits: Array) -> tuple[Array, Array]:
        weights, lse = super().softmax(logits)
        largest = np.max(logits, axis=-1, initial=-np.inf)
        shift = np.where(np.isinf(largest), 0.0, largest)
        total = self.added(np.exp(logits - shift[..., None]))
        return weights * np.where(total > 0, np.exp(lse - shift) / total, 0.0)[..., None], lse


class NarrowWeightedSum(_Narrow):
    def weighted_sum(self, weights: Array, mixed_v: Array, visible: NDArray[np.bool_]) -> Array:
        return self.added(np.einsum("bhts,bshe->bthes", weights, mixed_v))


class NarrowCollapse(_Narrow):
    def collapse(self, virtual_out: Array, R: Array) -> Array:
        if R.ndim == 2:
            R = np.eye(len(R))[:, :, None] * R
        B, T, H, e = virtual_out.shape
        P = R.shape[-1]
        terms = np.einsum("bnphe,ihp->bniehp", virtual_out.reshape(B, T // P, P, H, e), R)
        return self.added(terms.reshape(*terms.shape[:4], H * P))


class NarrowLogits(Port):
    """Logits stored in 16 bits."""

    def products(self, q: Array, k: Array, scale: float) -> Array:
        narrow = self.dtype if self.dtype in ("float16", "bfloat16") else "bfloat16"
        return cast(super().products(q, k, scale), narrow).astype(np.float64)


class Saturating(NarrowLogits):
    """Logits stored in 16 bits, and kept finite."""

    def products(self, q: Array, k: Array, scale: float) -> Array:
        return super().products(q, k, scale).clip(-60000, 60000)


class NaNErased(Port):
    """A row whose logits are all NaN taken for one that sees nothing."""

    def weighted_sum(self, weights: Array, mixed_v: Array, visible: NDArray[np.bool_]) -> Array:
        return np.nan_to_num(super().weighted_sum(weights, mixed_v, visible), nan=0.0)


class NarrowFrequencies(Port):
    """RoPE frequencies cast to float32, angles in float64."""

    def angles(self, position: Any, dims: Dims, config: AttentionConfig) -> Array | None:
        if config.rope == "none":
            return None
        frequency = np.float32(reference.rope_frequencies(dims.d, config.rope_theta)).astype(np.float64)
        one = AttentionConfig(rope=config.rope, rope_theta=1.0)
        angles: Array = np.asarray(super().angles(position, dims, one)) * frequency
        return angles


class Float32Inputs(Port):
    """Everything cast to float32 on entry."""

    def change_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        narrow = {name: x.astype(np.float32).astype(x.dtype) for name, x in inputs.items() if _is_float(x)}
        return {**inputs, **narrow}


class NarrowIds(Port):
    """Segment ids compared in float32."""

    def change_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        for name in ("segment_ids", "kv_segment_ids"):
            if name in inputs:
                inputs[name] = inputs[name].astype(np.float32).astype(np.int64)
        return inputs


def _is_float(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.name in ("float64", "float32", "float16", "bfloat16")


def _wrapped(x: Any) -> NDArray[np.int64]:
    """An integer as 32 bits keep it."""
    return np.asarray(x, dtype=np.int64).astype(np.int32).astype(np.int64)


class PositionsWrap(Port):
    def angles(self, position: Any, dims: Dims, config: AttentionConfig) -> Array | None:
        if config.rope == "none":
            return None
        virtual = (
            reference.virtual(position, dims.P)
            if config.rope == "virtual"
            else np.repeat(position, dims.P, 1)
        )
        return _wrapped(virtual)[:, :, None, None] * reference.rope_frequencies(dims.d, config.rope_theta)


class IndicesWrap(_Shifted):
    def visible(
        self, query_index: Any, key_index: Any, dims: Dims, config: AttentionConfig, **masks: Any
    ) -> Any:
        P = dims.P
        wrapped = np.floor_divide(_wrapped(reference.virtual(query_index, P)[:, ::P]), P)
        return super().visible(wrapped, key_index, dims, config, **masks)


class WindowWraps(Port):
    """W*P formed in 32 bits."""

    def visible(
        self, query_index: Any, key_index: Any, dims: Dims, config: AttentionConfig, **masks: Any
    ) -> Any:
        visible = super().visible(query_index, key_index, dims, config, **masks)
        if (
            config.window is not None
            and config.window_unit == "virtual"
            and _wrapped(config.window * dims.P) <= 0
        ):
            visible[...] = False
        return visible


class WindowFromTheEnd(Port):
    """The last W tokens of the keys for every query."""

    def visible(
        self, query_index: Any, key_index: Any, dims: Dims, config: AttentionConfig, **masks: Any
    ) -> Any:
        plain = AttentionConfig(causal=config.causal)
        visible = super().visible(query_index, key_index, dims, plain, **masks)
        if config.window is not None:
            visible = visible & (np.arange(dims.S) >= dims.S - config.window * dims.P)
        return visible


class ParametersRounded(Port):
    """Float32 parameters rounded to the storage dtype first."""

    def change_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        for name in ("alpha_q", "alpha_k", "alpha_v", "collapse"):
            inputs[name] = cast(inputs[name], self.dtype)
        return inputs


class NarrowOperands(Port):
    """Operands of the products rounded to 11 bits, as matrix units of class tf32 do."""

    def products(self, q: Array, k: Array, scale: float) -> Array:
        return super().products(cast(q, "float16").astype(float), cast(k, "float16").astype(float), scale)


class DroppedKeysLeak(Port):
    """Dropped keys and values multiplied by 0, which NaN and infinity survive."""

    def isolate(self, x: Array, key_mask: NDArray[np.bool_]) -> Array:
        return x

    def weighted_sum(self, weights: Array, mixed_v: Array, visible: NDArray[np.bool_]) -> Array:
        return np.einsum("bhts,bshe->bthe", weights, mixed_v)


class PerHeadTransposed(Port):
    """r read as [pseudo, head], wherever its shape allows that or by its numbers in order."""

    def collapse(self, virtual_out: Array, R: Array) -> Array:
        return super().collapse(virtual_out, R.T.ravel().reshape(R.shape) if R.ndim == 2 else R)


class PerHeadForAll(Port):
    """r applied to the mean of all heads."""

    def collapse(self, virtual_out: Array, R: Array) -> Array:
        if R.ndim == 2:
            virtual_out = np.broadcast_to(virtual_out.mean(axis=2, keepdims=True), virtual_out.shape)
        return super().collapse(virtual_out, R)


class BinaryLogarithm(Port):
    """Natural for the weights, and lse to base 2."""

    def softmax(self, logits: Array) -> tuple[Array, Array]:
        weights, lse = super().softmax(logits)
        return weights, lse / np.log(2.0)


class NotMixed(Port):
    """Heads copied to the pseudo-heads in place of mixing: repeated where there are fewer."""

    def __init__(self, *args: Any, tensor: str = "k", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tensor = tensor

    def mix(self, name: str, x: Array, alpha: Array) -> Array:
        G, H, P = alpha.shape
        if name == self.tensor:
            x, alpha = np.take(x, np.arange(H) * G // H, axis=2), np.repeat(np.eye(H)[:, :, None], P, axis=2)
        return super().mix(name, x, alpha)


def _other_tensor(name: str, used: str) -> type[Port]:
    """A mixing tensor used in place of another one, wherever their shapes agree."""

    class Mistaken(Port):
        def change_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
            if inputs[name].shape == inputs[used].shape:
                inputs[name] = inputs[used]
            return inputs

    return Mistaken


def _exponents(exponent: Callable[[Array, int], Array]) -> type[Port]:
    """Frequencies theta ** -exponent(i, d)."""

    class Changed(Port):
        def angles(self, position: Any, dims: Dims, config: AttentionConfig) -> Array | None:
            angles = super().angles(position, dims, config)
            if angles is None:
                return None
            frequency = config.rope_theta ** -exponent(np.arange(dims.d // 2), dims.d)
            return angles[..., :1] * frequency  # the first true frequency is 1

    return Changed


class ValuesRotated(Port):
    """Values rotated like the keys, where they are as wide."""

    def angles(self, position: Any, dims: Dims, config: AttentionConfig) -> Array | None:
        self._config, self._angles = config, super().angles(position, dims, config)  # the keys' come last
        return self._angles

    def weighted_sum(self, weights: Array, mixed_v: Array, visible: NDArray[np.bool_]) -> Array:
        if self._angles is not None and mixed_v.shape[-1] == 2 * self._angles.shape[-1]:
            mixed_v = self.rotate(mixed_v, self._angles, self._config)
        return super().weighted_sum(weights, mixed_v, visible)


class OffsetNotRotated(Port):
    """Queries rotated from 0 on, whatever their offset, unless they have positions."""

    def change_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        self._queries = "positions" not in inputs
        return inputs

    def angles(self, position: Any, dims: Dims, config: AttentionConfig) -> Array | None:
        if self._queries:  # they come first
            position = np.broadcast_to(np.arange(dims.N), position.shape)
        self._queries = False
        return super().angles(position, dims, config)


class NaNWhereNothingIsSeen(Port):
    def softmax(self, logits: Array) -> tuple[Array, Array]:
        exponentials = np.exp(logits - np.max(logits, axis=-1, initial=-np.inf, keepdims=True))
        return exponentials / exponentials.sum(axis=-1, keepdims=True), super().softmax(logits)[1]


class LinearMean(Port):
    """Linear attention divided by the number of visible keys."""

    def weighted_sum(self, weights: Array, mixed_v: Array, visible: NDArray[np.bool_]) -> Array:
        out = super().weighted_sum(weights, mixed_v, visible)
        if self._linear:
            out = out / np.maximum(1, visible.sum(axis=-1))[..., None, None]
        return out

    def change_config(self, config: dict[str, Any]) -> dict[str, Any]:
        self._linear = config["normalisation"] == "none"
        return config


FAULTS: dict[str, Any] = {
    "causal one key later": partial(_Shifted, causal=1),
    "causal without the own key": partial(_Shifted, causal=-1),
    "virtual window one wider (inclusive)": partial(_Shifted, window=1, unit="virtual"),
    "virtual window one narrower": partial(_Shifted, window=-1, unit="virtual"),
    "token window one wider (inclusive)": partial(_Shifted, window=1, unit="token"),
    "token window one narrower": partial(_Shifted, window=-1, unit="token"),
    "window one-sided without causality": OneSidedWindow,
    "window makes causal": WindowMakesCausal,
    "window units exchanged": _config(window_unit={"virtual": "token", "token": "virtual"}),
    "window ignored": _config(window=dict.fromkeys((1, 2, 3, 5))),
    "causal token for virtual": _config(causal={"virtual": "token"}),
    "causal virtual for token": _config(causal={"token": "virtual"}),
    "token for virtual positions": _config(rope={"virtual": "token"}),
    "virtual for token positions": _config(rope={"token": "virtual"}),
    "no rotation": _config(rope={"virtual": "none", "token": "none"}),
    "pairing exchanged": _config(rope_pairing={"half": "adjacent", "adjacent": "half"}),
    "opposite rotation": NegativeAngles,
    "base 10000": _config(rope_theta={500000.0: 10000.0}),
    "float32 angles": Float32Angles,
    "alpha_q [target, source]": partial(AlphaAxes, tensor="q"),
    "alpha_k [target, source]": partial(AlphaAxes, tensor="k"),
    "alpha_v [target, source]": partial(AlphaAxes, tensor="v"),
    "alpha_q [source, pseudo, target]": partial(AlphaAxes, tensor="q", axes=(0, 2, 1)),
    "alpha_k [source, pseudo, target]": partial(AlphaAxes, tensor="k", axes=(0, 2, 1)),
    "alpha_v [source, pseudo, target]": partial(AlphaAxes, tensor="v", axes=(0, 2, 1)),
    "alpha_v [pseudo, target, source]": partial(AlphaAxes, tensor="v", axes=(2, 1, 0)),
    "collapse [source, out]": CollapseAxes,
    "collapse [out, pseudo, source]": partial(CollapseAxes, axes=(0, 2, 1)),
    "pseudo-major": PseudoMajor,
    "reshaped without transposing": Reshaped,
    "queries aligned to the first keys": AlignedFirst,
    "scale of d + 1": ScaleOfNextWidth,
    "q and k x 1.01": LargerQK,
    "inverted key mask": InvertedKeyMask,
    "values repeated, not mixed": partial(NotMixed, tensor="v"),
    "mean for collapse": MeanCollapse,
    "last for collapse": LastCollapse,
    "first head off by 2%": partial(OneHeadOff, head=0),
    "second head off by 2%": partial(OneHeadOff, head=1),
    "first head 2% small": partial(OneHeadOff, head=0, factor=0.98),
    "last batch element replaced": LastBatchElementReplaced,
    "pseudo-heads as separate heads": PseudoHeadsApart,
    "mean where nothing is seen": MeanWhereNothingIsSeen,
    "no maximum subtracted": NoMaximum,
    "denominator + 0.001": Epsilon,
    "last key dropped": LastKeyDropped,
    "segments ignored": SegmentsIgnored,
    "positions used for masks": PositionsForMasks,
    "normalisation ignored": _config(normalisation={"none": "softmax"}),
    "linear divided by the number of keys": LinearMean,
    "causal where there is no mask": _config(causal={"none": "token"}),
    "mask ignored": _config(causal={"virtual": "none", "token": "none"}),
    "scale ignored": _config(scale=dict.fromkeys((0.25, 0.7, 1.0))),
    "first element's offset for all": FirstRowsOffset,
    "query_offset ignored": _without("query_offset"),
    "offset not rotated": OffsetNotRotated,
    "positions ignored": _without("positions", "kv_positions"),
    "kv_positions ignored": KeyPositionsIgnored,
    "kv_segment_ids ignored": KeySegmentsIgnored,
    "key mask ignored": _without("key_mask"),
    "key mask over virtual keys": KeyMaskTiled,
    "scale of e": ScaleOfValueWidth,
    "mixing summed in 16 bits": NarrowMixing,
    "products summed in 16 bits": NarrowProducts,
    "denominator summed in 16 bits": NarrowDenominator,
    "weighted sum in 16 bits": NarrowWeightedSum,
    "collapse summed in 16 bits": NarrowCollapse,
    "logits stored in 16 bits": NarrowLogits,
    "logits stored in 16 bits, saturating": Saturating,
    "frequencies in float32": NarrowFrequencies,
    "visible NaN erased": NaNErased,
    "inputs cast to float32": Float32Inputs,
    "segment ids in float32": NarrowIds,
    "virtual positions wrap at 32 bits": PositionsWrap,
    "virtual indices wrap at 32 bits": IndicesWrap,
    "W*P wraps at 32 bits": WindowWraps,
    "window counted from the end": WindowFromTheEnd,
    "parameters rounded to storage": ParametersRounded,
    "operands rounded to 11 bits": NarrowOperands,
    "dropped keys leak": DroppedKeysLeak,
    "per-head collapse transposed": PerHeadTransposed,
    "per-head collapse of the mean head": PerHeadForAll,
    "lse to base 2": BinaryLogarithm,
    "keys repeated, not mixed": partial(NotMixed, tensor="k"),
    "queries not mixed": partial(NotMixed, tensor="q"),
    "alpha_v used for keys": _other_tensor("alpha_k", "alpha_v"),
    "alpha_k used for values": _other_tensor("alpha_v", "alpha_k"),
    "alpha_q used for keys": _other_tensor("alpha_k", "alpha_q"),
    "alpha_k used for queries": _other_tensor("alpha_q", "alpha_k"),
    "exponent i/(d/2 - 1)": _exponents(lambda i, d: i / max(1, d // 2 - 1)),
    "exponent (2i + 1)/d": _exponents(lambda i, d: (2 * i + 1) / d),
    "exponent i/d": _exponents(lambda i, d: i / d),
    "values rotated": ValuesRotated,
    "NaN where nothing is seen": NaNWhereNothingIsSeen,
}
"""Faulty ports by name: constructors that take the arguments of `Port`."""

IN_STAGES = ("lse to base 2",)
"""Faults that the output does not show: a port has them only if it offers the stage."""

ONLY_IN = {
    "parameters rounded to storage": ("float16", "bfloat16"),
    "operands rounded to 11 bits": ("float32",),
    "inputs cast to float32": ("float64",),
}
"""Faults that exist in some dtypes only.

Parameters are wider than the storage dtype only where that has 16 bits, operands that are stored in 16
bits have 11 or fewer already, and only float64 inputs are wider than float32.
"""
