"""Validation of the operation's arguments, once for every backend.

It reads nothing of an array but `.shape` and `.dtype`, so the same lines serve NumPy, PyTorch, JAX,
MLX and any Array API library, traced arrays included. SPEC.md [DIM-1], [DIM-2], [TYP-1] to [TYP-3],
[ARG-1] to [ARG-4], [ERR-1].
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import numpy as np
from numpy.ma import MaskedArray  # by name: numpy loads it late, and a signal may come in between

from iha_core.config import AttentionConfig, CollapseKind
from iha_core.errors import ArgumentTypeError, ArgumentValueError, DTypeError, ShapeError

FLOAT_DTYPES = ("float64", "float32", "float16", "bfloat16")
NARROW_DTYPES = ("float16", "bfloat16")
INTEGER_DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
MAX_TOKEN_INDEX = 2**31
"""Token indices and positions lie in [-2**31, 2**31) ([IDX-2])."""


@dataclasses.dataclass(frozen=True, slots=True)
class Dims:
    """The sizes of one call, in the letters of SPEC.md's dimension legend."""

    B: int
    N: int
    M: int
    H: int
    G: int
    P: int
    d: int
    e: int
    collapse_kind: CollapseKind

    @property
    def T(self) -> int:
        """Number of virtual queries, N*P."""
        return self.N * self.P

    @property
    def S(self) -> int:
        """Number of virtual keys, M*P."""
        return self.M * self.P


def dtype_name(array: Any) -> str:
    """Name of an array's dtype without its framework: "float32", "bfloat16", "bool"."""
    dtype = array.dtype
    name = str(getattr(dtype, "name", dtype)).rpartition(".")[2]
    return "bool" if name == "bool_" else name


def parameter_dtypes(storage: str) -> tuple[str, ...]:
    """What mixing tensors and collapse may have beside a storage dtype, itself first ([TYP-2])."""
    return (storage, "float32") if storage in NARROW_DTYPES else (storage,)


def validate(
    q: Any,
    k: Any,
    v: Any,
    alpha_q: Any,
    alpha_k: Any,
    alpha_v: Any,
    collapse: Any,
    *,
    config: AttentionConfig,
    key_mask: Any = None,
    segment_ids: Any = None,
    kv_segment_ids: Any = None,
    positions: Any = None,
    kv_positions: Any = None,
    query_offset: Any = None,
) -> Dims:
    """Check all arguments of `attention` and return the sizes they agree on.

    Raises:
        ShapeError: wrong rank or size.
        DTypeError: a dtype that is not allowed or does not go with the others.
        ArgumentTypeError: something that is no array, or no `AttentionConfig`.
        ArgumentValueError: a combination or value that is not allowed.
    """
    if not isinstance(config, AttentionConfig):
        raise ArgumentTypeError("config", "", expected="an AttentionConfig", found=type(config).__name__)
    dims = _validate_floats(q, k, v, alpha_q, alpha_k, alpha_v, collapse)
    if config.rope != "none" and dims.d % 2:  # [ROPE-6]
        raise ShapeError(
            "q", "shape", expected=f"an even head width d with rope={config.rope!r}", found=f"d={dims.d}"
        )
    if key_mask is not None:
        _check_shape("key_mask", key_mask, B=dims.B, M=dims.M)
        if dtype_name(key_mask) != "bool":
            raise DTypeError("key_mask", "dtype", expected="bool", found=dtype_name(key_mask))
    _validate_pair("segment_ids", segment_ids, kv_segment_ids, dims)
    _validate_pair("positions", positions, kv_positions, dims)
    _validate_offset(query_offset, dims)
    return dims


def validate_cotangent(cotangent: Any, q: Any, dims: Dims) -> None:
    """Check the cotangent of a backward pass against valid arguments ([GRAD-9]).

    Raises:
        ShapeError: another shape than the output's.
        DTypeError: another dtype than that of q.
        ArgumentTypeError: no array.
    """
    _check_shape("cotangent", cotangent, B=dims.B, N=dims.N, H=dims.H, e=dims.e)
    if dtype_name(cotangent) != dtype_name(q):
        expected = f"{dtype_name(q)}, the dtype of `q`"
        raise DTypeError("cotangent", "dtype", expected=expected, found=dtype_name(cotangent))


def _validate_floats(q: Any, k: Any, v: Any, alpha_q: Any, alpha_k: Any, alpha_v: Any, collapse: Any) -> Dims:
    B, N, H, d = _sizes("q", q, "B", "N", "H", "d")
    _, M, G, _ = _sizes("k", k, "B", "M", "G", "d")
    _check_shape("k", k, B=B, M=None, G=None, d=d)
    e = _sizes("v", v, "B", "M", "G", "e")[3]
    _check_shape("v", v, B=B, M=M, G=G, e=None)
    P = _sizes("alpha_q", alpha_q, "H", "H", "P")[2]
    _check_shape("alpha_q", alpha_q, H=H, H_=H, P=None)
    _check_shape("alpha_k", alpha_k, G=G, H=H, P=P)
    _check_shape("alpha_v", alpha_v, G=G, H=H, P=P)
    kind: CollapseKind = "global"
    if _rank("collapse", collapse) == 2:
        kind = "per_head"
        _check_shape("collapse", collapse, H=H, P=P)
    elif _rank("collapse", collapse) == 3:
        _check_shape("collapse", collapse, H=H, H_=H, P=P)
    else:
        expected = f"(H={H}, H={H}, P={P}) or (H={H}, P={P})"
        raise ShapeError("collapse", "shape", expected=expected, found=str(_shape(collapse)))

    storage = dtype_name(q)
    if storage not in FLOAT_DTYPES:
        raise DTypeError("q", "dtype", expected="one of " + ", ".join(FLOAT_DTYPES), found=storage)
    for argument, array in (("k", k), ("v", v)):
        if dtype_name(array) != storage:
            expected = f"{storage}, the dtype of `q`"
            raise DTypeError(argument, "dtype", expected=expected, found=dtype_name(array))
    parameter = dtype_name(alpha_q)
    allowed = parameter_dtypes(storage)
    if parameter not in allowed:
        raise DTypeError("alpha_q", "dtype", expected=" or ".join(allowed), found=parameter)
    for argument, array in (("alpha_k", alpha_k), ("alpha_v", alpha_v), ("collapse", collapse)):
        if dtype_name(array) != parameter:
            raise DTypeError(
                argument, "dtype", expected=f"{parameter}, the dtype of `alpha_q`", found=dtype_name(array)
            )
    return Dims(B=B, N=N, M=M, H=H, G=G, P=P, d=d, e=e, collapse_kind=kind)


def _validate_pair(argument: str, query_side: Any, key_side: Any, dims: Dims) -> None:
    """One array serves both sides where N = M; the key side never stands alone ([ARG-3], [ARG-4])."""
    if query_side is None:
        if key_side is not None:
            raise ArgumentValueError(
                argument, "", expected=f"an array, since kv_{argument} is given", found="None"
            )
        return
    _check_shape(argument, query_side, B=dims.B, N=dims.N)
    _check_integer(argument, query_side)
    if key_side is not None:
        _check_shape(f"kv_{argument}", key_side, B=dims.B, M=dims.M)
        _check_integer(f"kv_{argument}", key_side)
    elif dims.N != dims.M:
        raise ArgumentValueError(
            f"kv_{argument}",
            "",
            expected=f"an array (B={dims.B}, M={dims.M}), as {argument} alone serves both sides if N = M",
            found=f"None with N={dims.N}",
        )


def _validate_offset(query_offset: Any, dims: Dims) -> None:
    if query_offset is None:
        return
    # Plain integers first, since a compiler cannot ask a symbolic one for its attributes.
    if isinstance(query_offset, (int, np.integer)) and not isinstance(query_offset, bool):
        if not -MAX_TOKEN_INDEX <= query_offset <= MAX_TOKEN_INDEX - max(dims.N, 1):  # [IDX-2]
            # Made only now, since a compiler would fix N to put it into a text.
            expected = f"an int in [-2**31, 2**31 - {max(dims.N, 1)}]"
            raise ArgumentValueError("query_offset", "", expected=expected, found=str(query_offset))
        return
    if hasattr(query_offset, "shape") and not isinstance(query_offset, type):
        _check_integer("query_offset", query_offset)
        if _shape(query_offset) not in ((), (dims.B,)):
            raise ShapeError(
                "query_offset", "shape", expected=f"() or (B={dims.B},)", found=str(_shape(query_offset))
            )
        return
    if isinstance(query_offset, (bool, type)) or not hasattr(query_offset, "__index__"):
        raise ArgumentTypeError(
            "query_offset",
            "",
            expected="None, an int, or an integer array () or (B,)",
            found=type(query_offset).__name__,
        )
    _validate_offset(operator.index(query_offset), dims)


def _shape(array: Any) -> tuple[int, ...]:
    return tuple(array.shape)


def check_array(argument: str, array: Any) -> None:
    """Refuse what is no plain array, of whatever framework.

    Raises:
        ArgumentTypeError: it is something else, or an array with rules of its own.
    """
    is_array = hasattr(array, "dtype") and hasattr(getattr(array, "shape", None), "__len__")
    if not is_array or isinstance(array, type):
        raise ArgumentTypeError(argument, "", expected="an array", found=type(array).__name__)
    if isinstance(array, (np.matrix, MaskedArray)):
        # Their own rules of shape and arithmetic would change the result, or lose the mask.
        raise ArgumentTypeError(argument, "", expected="a plain array", found=type(array).__name__)


def _rank(argument: str, array: Any) -> int:
    check_array(argument, array)
    return len(array.shape)


def _sizes(argument: str, array: Any, *letters: str) -> tuple[int, ...]:
    """The sizes of an array, which must have one axis for each letter; only B, N and M may be 0."""
    if _rank(argument, array) != len(letters):
        raise ShapeError(argument, "shape", expected="(" + ", ".join(letters) + ")", found=str(_shape(array)))
    for letter, size in zip(letters, _shape(array), strict=True):
        if size < 1 and letter not in ("B", "N", "M"):
            raise ShapeError(argument, "shape", expected=f"{letter} >= 1", found=str(_shape(array)))
    return _shape(array)


def _check_shape(argument: str, array: Any, **sizes: int | None) -> None:
    """Compare an array's shape with named sizes; None leaves a size open, `H_` is a second H."""
    rank = _rank(argument, array)
    wanted = list(sizes.values())
    fits = rank == len(wanted) and all(
        want is None or want == have for want, have in zip(wanted, _shape(array), strict=True)
    )
    if not fits:
        legend = [letter.rstrip("_") + ("" if size is None else f"={size}") for letter, size in sizes.items()]
        trailing = "," if len(legend) == 1 else ""
        raise ShapeError(
            argument, "shape", expected="(" + ", ".join(legend) + trailing + ")", found=str(_shape(array))
        )


def _check_integer(argument: str, array: Any) -> None:
    if not hasattr(array, "dtype"):
        raise ArgumentTypeError(argument, "", expected="an integer array", found=type(array).__name__)
    if dtype_name(array) not in INTEGER_DTYPES:
        raise DTypeError(argument, "dtype", expected="an integer dtype", found=dtype_name(array))
