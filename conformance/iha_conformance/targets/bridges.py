"""Bridges: NumPy arrays into a framework, memory layout included, and back. In the worker process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from iha_conformance.protocol import UNDECLARED, TargetUnavailable
from iha_conformance.targets.jax_bridge import JaxBridge
from iha_conformance.targets.messages import Function, RefusedError, describe
from iha_core import GRADIENTS

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

    def compiles_once(self, inputs: Mapping[str, Any]) -> bool:
        """Whether compilation takes so long that there is one function for both runs of such a case.

        It gives the output and no other stage; its code is that of `attention`.
        """
        ...

    def call(
        self, function: Function, arguments: Mapping[str, Any], config: Any, then: Function | None = None
    ) -> Any:
        """Call a backend's function as users of the framework do; `arguments` are native.

        `then` is what will be called next with such arguments: there may be something to prepare.
        """
        ...

    @property
    def differentiates(self) -> bool:
        """Whether there are `gradients`."""
        ...

    def gradients(
        self, stages: Function, arguments: Mapping[str, Any], config: Any, cotangent: Any
    ) -> tuple[dict[str, Any], str]:
        """Gradients by argument, by the framework's own differentiation, and the kernel of the forward pass.

        `stages` is a backend's `attention_stages`; `arguments` and `cotangent` are native.
        """
        ...


class EagerBridge:
    """A framework that computes at once, or when it is asked for values: there is nothing to compile."""

    def compiles_once(self, inputs: Mapping[str, Any]) -> bool:
        return False

    def call(
        self, function: Function, arguments: Mapping[str, Any], config: Any, then: Function | None = None
    ) -> Any:
        return function(**arguments, config=config)

    differentiates = False

    def gradients(
        self, stages: Function, arguments: Mapping[str, Any], config: Any, cotangent: Any
    ) -> tuple[dict[str, Any], str]:
        raise RefusedError("the framework does not differentiate")


class NamespaceBridge(EagerBridge):
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


class TorchBridge(EagerBridge):
    """PyTorch, on any of its devices."""

    differentiates = True

    WORDS: Mapping[str, str] = {"highest": "highest", "tf32": "high", "bf16x3": "highest", "bf16x1": "medium"}
    """PyTorch's own word for the products of a precision class, or for better ones: `high` may mean tf32."""

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
        """The array with its strides, which plain conversion loses on accelerators."""
        memory, steps = _memory(array)
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

    def gradients(
        self, stages: Function, arguments: Mapping[str, Any], config: Any, cotangent: Any
    ) -> tuple[dict[str, Any], str]:
        leaves = [arguments[name].requires_grad_() for name in GRADIENTS]
        found, kernel = stages(**arguments, config=config)
        gradients = self._torch.autograd.grad(found["output"], leaves, cotangent, materialize_grads=True)
        return dict(zip(GRADIENTS, gradients, strict=True)), kernel


class MlxBridge(EagerBridge):
    """MLX, on the CPU or the GPU, which becomes the default device of the process."""

    differentiates = True

    TF32 = "MLX_ENABLE_TF32"
    """Environment variable by which GPUs round the operands of float32 products; MLX's default is 1."""

    def __init__(self, mlx: Any, device: str | None = None, precision: str | None = None) -> None:
        self._mlx = mlx
        self.device = device or "cpu"
        if precision is not None:  # before the first computation, when MLX reads it
            os.environ[self.TF32] = "0" if precision == "highest" else "1"
        try:
            mlx.set_default_device({"cpu": mlx.cpu, "gpu": mlx.gpu}[self.device])
            mlx.eval(mlx.zeros(1) + 1)
        except Exception as error:
            raise TargetUnavailable(f"no device {device!r}: {describe(error)}") from error
        rounds = self.device == "gpu" and os.environ.get(self.TF32) != "0"
        self.precision = precision or ("tf32" if rounds else "highest")

    def to_native(self, array: np.ndarray[Any, Any]) -> Any:
        """The array with its strides, which plain conversion loses."""
        if array.dtype.name == "float64" and self.device == "gpu":
            raise RefusedError("device gpu has no float64")
        if array.dtype.name != "bool" and not hasattr(self._mlx, array.dtype.name):
            raise RefusedError(f"mlx has no {array.dtype.name}")
        memory, steps = _memory(array)
        if array.size == 0:  # which MLX does not view
            return self._flat(memory).reshape(array.shape)
        return self._mlx.as_strided(self._flat(memory), array.shape, steps)

    def _flat(self, memory: np.ndarray[Any, Any]) -> Any:
        if memory.dtype.name == "bfloat16":
            return self._mlx.array(memory.view(np.uint16)).view(self._mlx.bfloat16)
        if memory.dtype.name == "float64":  # which MLX would narrow
            return self._mlx.array(memory, dtype=self._mlx.float64)
        return self._mlx.array(memory)

    def to_numpy(self, native: Any) -> np.ndarray[Any, Any]:
        if native.dtype == self._mlx.bfloat16:
            import ml_dtypes

            return np.array(native.view(self._mlx.uint16)).view(ml_dtypes.bfloat16)
        return np.array(native)

    def gradients(
        self, stages: Function, arguments: Mapping[str, Any], config: Any, cotangent: Any
    ) -> tuple[dict[str, Any], str]:
        rest = {name: value for name, value in arguments.items() if name not in GRADIENTS}
        kernels: list[str] = []

        def output(*floats: Any) -> Any:
            found, kernel = stages(**dict(zip(GRADIENTS, floats, strict=True)), **rest, config=config)
            kernels.append(kernel)
            return found["output"]

        _, gradients = self._mlx.vjp(output, [arguments[name] for name in GRADIENTS], [cotangent])
        return dict(zip(GRADIENTS, gradients, strict=True)), kernels[0]


def _memory(array: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], tuple[int, ...]]:
    """A copy of the memory that a view spans, flat, and the steps in it by which to view it again.

    Frameworks have no negative strides, so reversed views become contiguous.
    """
    if array.size == 0 or any(stride < 0 or stride % array.itemsize for stride in array.strides):
        array = np.ascontiguousarray(array)
    steps = tuple(stride // array.itemsize for stride in array.strides)
    span = 1 + sum((size - 1) * step for size, step in zip(array.shape, steps, strict=True))
    if array.size == 0:
        span = 0
    return np.lib.stride_tricks.as_strided(array, (span,), (array.itemsize,)).copy(), steps


BRIDGES: Mapping[str, Callable[..., Bridge]] = {
    "torch": TorchBridge,
    "jax": JaxBridge,
    "mlx.core": MlxBridge,
}
"""Bridge of a framework, by the name of its module; any other module is an Array API namespace.

Each is made from that module, the device and the precision class asked for (None: the default ones).
"""
