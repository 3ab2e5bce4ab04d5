"""Bridges: NumPy arrays into a framework, memory layout included, and back. In the worker process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from iha_conformance.protocol import UNDECLARED, TargetUnavailable
from iha_conformance.targets.messages import RefusedError, describe

UNROUNDED = ("numpy", "array_api_strict")
"""Namespaces that multiply unrounded operands on the CPU, whatever the environment says ([NUM-8])."""


class Bridge(Protocol):
    """One framework, on one device, in one precision class."""

    @property
    def device(self) -> str:
        """Where arrays are placed, in the framework's words."""
        ...

    @property
    def precision(self) -> str:
        """Precision class in force ([NUM-8])."""
        ...

    def to_native(self, array: np.ndarray[Any, Any]) -> Any:
        """The same values in the same memory layout; raises `RefusedError` for a dtype it lacks."""
        ...

    def to_numpy(self, native: Any) -> np.ndarray[Any, Any]:
        """A copy of the values."""
        ...

    def call(self, function: Callable[..., Any], arguments: Mapping[str, Any], config: Any) -> Any:
        """Call a backend's function as users of the framework do; `arguments` are native."""
        ...


class NamespaceBridge:
    """Any module that follows the Array API standard, on the CPU."""

    device = "cpu"

    def __init__(self, namespace: Any, device: str | None = None, precision: str | None = None) -> None:
        self._namespace = namespace
        self._name = namespace.__name__
        if device not in (None, "cpu"):
            raise TargetUnavailable(f"expected device cpu, got {device!r}")
        if not hasattr(namespace, "asarray"):
            raise TargetUnavailable("expected an Array API namespace, which has asarray")
        self.precision = precision or ("highest" if self._name in UNROUNDED else UNDECLARED)

    def to_native(self, array: np.ndarray[Any, Any]) -> Any:
        dtype = array.dtype.name
        refusal = RefusedError(f"{self._name} has no {dtype}")
        if dtype != "bool" and not hasattr(self._namespace, dtype):
            raise refusal
        native = self._namespace.asarray(array)
        if str(native.dtype).rpartition(".")[2] != dtype:  # a namespace may narrow silently
            raise refusal
        return native

    def to_numpy(self, native: Any) -> np.ndarray[Any, Any]:
        if isinstance(native, np.ndarray) or hasattr(native, "__array__"):
            return np.array(native, subok=False)
        array: np.ndarray[Any, Any] = np.from_dlpack(native)
        return array.copy()

    def call(self, function: Callable[..., Any], arguments: Mapping[str, Any], config: Any) -> Any:
        return function(**arguments, config=config)


class TorchBridge:
    """PyTorch, on any of its devices."""

    WORDS: Mapping[str, str] = {"highest": "highest", "tf32": "high", "bf16x3": "high", "bf16x1": "medium"}
    """PyTorch's own word for the products of a precision class, or for better ones."""

    def __init__(self, torch: Any, device: str | None = None, precision: str | None = None) -> None:
        self._torch = torch
        try:
            self._device = torch.device(device or "cpu")
            torch.zeros(1, device=self._device)
        except Exception as error:
            raise TargetUnavailable(f"no device {device!r}: {describe(error)}") from error
        self.device = str(self._device)
        if precision is not None:
            torch.set_float32_matmul_precision(self.WORDS[precision])
        self.precision = precision or str(torch.get_float32_matmul_precision())

    def to_native(self, array: np.ndarray[Any, Any]) -> Any:
        """The array with its strides, which plain conversion loses on accelerators.

        The memory that the view spans is copied, moved, and viewed again. torch has no negative
        strides, so reversed views arrive as contiguous copies.
        """
        if array.size == 0 or any(stride < 0 or stride % array.itemsize for stride in array.strides):
            array = np.ascontiguousarray(array)
        steps = tuple(stride // array.itemsize for stride in array.strides)
        span = 1 + sum((size - 1) * step for size, step in zip(array.shape, steps, strict=True))
        if array.size == 0:
            span = 0
        memory = np.lib.stride_tricks.as_strided(array, (span,), (array.itemsize,)).copy()
        is_bfloat16 = array.dtype.name == "bfloat16"
        if not is_bfloat16 and not hasattr(self._torch, array.dtype.name):
            raise RefusedError(f"torch has no {array.dtype.name}")
        flat = self._torch.from_numpy(memory.view(np.int16) if is_bfloat16 else memory)
        flat = flat.view(self._torch.bfloat16) if is_bfloat16 else flat
        try:
            flat = flat.to(self._device)
        except TypeError as error:  # as MPS says that it has no float64
            raise RefusedError(f"device {self._device} has no {array.dtype.name}") from error
        return flat.as_strided(array.shape, steps)

    def to_numpy(self, native: Any) -> np.ndarray[Any, Any]:
        native = native.detach().cpu().contiguous()
        if native.dtype is self._torch.bfloat16:
            import ml_dtypes

            return np.array(native.view(self._torch.int16).numpy().view(ml_dtypes.bfloat16))
        return np.array(native.numpy())

    def call(self, function: Callable[..., Any], arguments: Mapping[str, Any], config: Any) -> Any:
        return function(**arguments, config=config)


BRIDGES: Mapping[str, Callable[[Any, str | None, str | None], Bridge]] = {
    "torch": TorchBridge,
}
"""Bridge of a framework, by the name of its module; any other module is an Array API namespace."""
