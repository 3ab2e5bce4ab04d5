"""`LayerConfig`: sizes and choices of the layer around the operation, and the tensors that follow from them.

SPEC.md chapter 10. Sizes have the letters of its legend: D model width, H heads, G key/value heads,
P pseudo-heads, d query and key width, e value width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from iha_core.config import (
    AttentionConfig,
    CollapseKind,
    check_choice,
    describe,
    known_fields,
    positive_real,
    whole_number,
)
from iha_core.errors import ArgumentTypeError, ArgumentValueError, ConfigError, DTypeError, ShapeError
from iha_core.validation import dtype_name

LayerKind = Literal["iha", "mha"]

MIXING = ("alpha_q", "alpha_k", "alpha_v", "collapse")
"""Tensors of the operation that a layer of kind "iha" learns, by their names in a checkpoint ([CKPT-1])."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerConfig:
    """Configuration of a layer ([LAY-1]); immutable and hashable, every size filled in.

    Args:
        kind: "iha", or "mha" for plain multi-head attention: P = 1 and nothing to mix ([LAY-6]).
        model_width: D, width of the input and of the output.
        num_heads: H, heads of the queries and of the output.
        head_width: d, width of a query or key head; None means D/H, which must be whole.
        num_pseudo_heads: P; None means H for kind "iha", 1 for "mha".
        num_kv_heads: G, heads of the keys and values; None means H. It divides H for kind "mha".
        value_width: e, width of a value head; None means d.
        bias: whether the four projections have one.
        qk_norm: whether queries and keys are normalised per head before they are mixed ([LAY-4]).
        qk_norm_epsilon: number that is added to their mean square, from 2**-126 to 2**127.
        collapse: "global" (H, H, P) or "per_head" (H, P).
        attention: configuration of the operation.

    Raises:
        ConfigError: a value that is not allowed, or that disagrees with another (a ValueError).
        ArgumentTypeError: a value of the wrong type (a TypeError).
    """

    kind: LayerKind = "iha"
    model_width: int
    num_heads: int
    head_width: int = None  # type: ignore[assignment]  # never None once it is made
    num_pseudo_heads: int = None  # type: ignore[assignment]
    num_kv_heads: int = None  # type: ignore[assignment]
    value_width: int = None  # type: ignore[assignment]
    bias: bool = False
    qk_norm: bool = False
    qk_norm_epsilon: float = 1e-6
    collapse: CollapseKind = "global"
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(LayerKind))
        check_choice("collapse", self.collapse, get_args(CollapseKind))
        for field in ("bias", "qk_norm"):
            if not isinstance(getattr(self, field), bool):
                found = describe(getattr(self, field))
                raise ArgumentTypeError(field, "", expected="True or False", found=found)
        if not isinstance(self.attention, AttentionConfig):
            found = describe(self.attention)
            raise ArgumentTypeError("attention", "", expected="an AttentionConfig", found=found)
        epsilon = positive_real("qk_norm_epsilon", self.qk_norm_epsilon)
        if not 2.0**-126 <= epsilon <= 2.0**127:  # float32 has to hold it
            expected = "a number from 2**-126 to 2**127"
            raise ConfigError("qk_norm_epsilon", "", expected=expected, found=repr(epsilon))
        self._set("qk_norm_epsilon", epsilon)
        self._fill_size("model_width", None)
        self._fill_size("num_heads", None)
        if self.head_width is None and self.model_width % self.num_heads:
            expected = (
                f"a width, as num_heads={self.num_heads} does not divide model_width={self.model_width}"
            )
            raise ConfigError("head_width", "", expected=expected, found="None")
        self._fill_size("head_width", self.model_width // self.num_heads)
        self._fill_size("num_pseudo_heads", self.num_heads if self.kind == "iha" else 1)
        self._fill_size("num_kv_heads", self.num_heads)
        self._fill_size("value_width", self.head_width)
        self._check_agreement()

    def _set(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)

    def _fill_size(self, field: str, default: int | None) -> None:
        found = getattr(self, field)
        if found is None and default is not None:
            self._set(field, default)
        else:
            self._set(field, whole_number(field, found, "a whole number >= 1"))

    def _check_agreement(self) -> None:
        if self.attention.rope != "none" and self.head_width % 2:  # [ROPE-6]
            expected = f"an even width with rope={self.attention.rope!r}"
            raise ConfigError("head_width", "", expected=expected, found=str(self.head_width))
        if self.kind == "iha":
            return
        if self.num_pseudo_heads != 1:
            found = str(self.num_pseudo_heads)
            raise ConfigError("num_pseudo_heads", "", expected="1 with kind='mha'", found=found)
        if self.num_heads % self.num_kv_heads:
            expected = f"a divisor of num_heads={self.num_heads} with kind='mha'"
            raise ConfigError("num_kv_heads", "", expected=expected, found=str(self.num_kv_heads))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> LayerConfig:
        """Build a configuration from plain values, `attention` a mapping of its own.

        Raises:
            ConfigError: an unknown or missing field, or a value that is not allowed (a ValueError).
            ArgumentTypeError: no mapping, or a value of the wrong type (a TypeError).
        """
        known = known_fields(cls, fields)
        for name in ("model_width", "num_heads"):
            if name not in known:
                raise ConfigError(name, "", expected="a whole number >= 1", found="nothing")
        if "attention" in known and not isinstance(known["attention"], AttentionConfig):
            known["attention"] = AttentionConfig.from_dict(known["attention"])
        return cls(**known)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values, defaults included."""
        return dataclasses.asdict(self)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters by their names in a checkpoint, in the order of [CKPT-1]."""
        D, H, G, P = self.model_width, self.num_heads, self.num_kv_heads, self.num_pseudo_heads
        d, e = self.head_width, self.value_width
        shapes: dict[str, tuple[int, ...]] = {}
        for name, outputs, inputs in (
            ("q_proj", H * d, D),
            ("k_proj", G * d, D),
            ("v_proj", G * e, D),
            ("o_proj", D, H * e),
        ):
            shapes[f"{name}.weight"] = (outputs, inputs)
            if self.bias:
                shapes[f"{name}.bias"] = (outputs,)
        if self.qk_norm:
            shapes |= {"q_norm.weight": (d,), "k_norm.weight": (d,)}
        if self.kind == "iha":
            shapes |= {"alpha_q": (H, H, P), "alpha_k": (G, H, P), "alpha_v": (G, H, P)}
            shapes["collapse"] = (H, H, P) if self.collapse == "global" else (H, P)
        return shapes

    def check_input(self, x: Any, storage: str | None = None) -> None:
        """Hold a layer's input to the configuration; reads nothing but `.shape` and `.dtype`.

        Args:
            x: an array of any framework.
            storage: dtype of the projections, which x has to have; None where any does.

        Raises:
            ShapeError: it is not (B, N, D).
            DTypeError: it has another dtype.
        """
        shape = tuple(x.shape)
        if len(shape) != 3 or shape[-1] != self.model_width:
            raise ShapeError("x", "shape", expected=f"(B, N, D={self.model_width})", found=str(shape))
        if storage is not None and dtype_name(x) != storage:
            expected = f"{storage}, the dtype of `q_proj.weight`"
            raise DTypeError("x", "dtype", expected=expected, found=dtype_name(x))

    def check_parameters(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Hold parameters to the configuration by their names and shapes ([CKPT-1], [CKPT-4]).

        Raises:
            ArgumentValueError: a tensor is missing, or one too many.
            ShapeError: a tensor has another shape.
        """
        wanted = self.parameter_shapes()
        for name, shape in wanted.items():
            if name not in shapes:
                raise ArgumentValueError(name, "", expected=f"a tensor {shape}", found="none of that name")
            if tuple(shapes[name]) != shape:
                raise ShapeError(name, "shape", expected=str(shape), found=str(tuple(shapes[name])))
        for name in shapes:
            if name not in wanted:
                expected = "no tensor beside " + ", ".join(wanted)
                raise ArgumentValueError(name, "", expected=expected, found="one of that name")
