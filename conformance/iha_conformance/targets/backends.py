"""The backends of this project as targets, and what is known about them without importing any.

An adapter pairs a backend package with a *bridge*, which carries NumPy arrays into a framework,
memory layout included, and back.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from iha_conformance.protocol import UNDECLARED, Inputs, TargetInfo, TargetUnavailable
from iha_conformance.targets.messages import Arrays, RefusedError, WrongReturnError, describe

ARRAY_API = "array-api"
NAMESPACES = ("numpy", "array_api_strict", "torch")
"""Array API namespaces that `--backend array-api` means, where they are installed."""

UNROUNDED = ("numpy", "array_api_strict")
"""Namespaces that multiply unrounded operands on the CPU, whatever the environment says ([NUM-8])."""


@dataclasses.dataclass(frozen=True)
class Backend:
    """A backend's package, and the modules that must be there for it, framework first."""

    package: str
    needs: tuple[str, ...]


BACKENDS: Mapping[str, Backend] = {
    "torch": Backend("iha_torch", ("torch",)),
    ARRAY_API: Backend("iha_array_api", ("array_api_compat",)),
}


# Discovery, in the parent process


def known_targets() -> tuple[str, ...]:
    """Names of all built-in targets, installed or not."""
    single = [name for name in BACKENDS if name != ARRAY_API]
    return (*single, *(f"{ARRAY_API}:{namespace}" for namespace in NAMESPACES))


def canonical_name(name: str) -> str:
    """A target's name with its namespace spelled as a module: array-api-strict is array_api_strict."""
    backend, colon, namespace = name.partition(":")
    return backend + colon + namespace.replace("-", "_")


def missing_module(name: str) -> str | None:
    """The module that a built-in target lacks, or None if all are there; imports none of them."""
    backend, _, namespace = name.partition(":")
    entry = BACKENDS[backend]
    modules: list[str] = [namespace] if namespace else []
    for module in [*modules, *entry.needs, entry.package]:
        try:
            found = importlib.util.find_spec(module.partition(".")[0])
        except (ImportError, ValueError):
            found = None
        if found is None:
            return module
    return None


def has_devices(name: str) -> bool:
    """Whether a built-in target can be asked to run elsewhere than on the CPU."""
    return name.partition(":")[2] in ("", "torch")


# Bridges, in the worker process


class Bridge(Protocol):
    """NumPy arrays into a framework and back."""

    def to_native(self, array: np.ndarray[Any, Any]) -> Any:
        """The same values in the same memory layout; raises `RefusedError` for a dtype it lacks."""
        ...

    def to_numpy(self, native: Any) -> np.ndarray[Any, Any]:
        """A copy of the values."""
        ...


class NamespaceBridge:
    """Any module that follows the Array API standard."""

    def __init__(self, namespace: Any) -> None:
        self._namespace = namespace
        self._name = namespace.__name__

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


class TorchBridge:
    """PyTorch, on any of its devices."""

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch = torch
        self._device = device

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


# Adapters, in the worker process


class BackendAdapter:
    """A backend package with `attention` and `attention_stages`, and the bridge to its framework."""

    capabilities = frozenset({"invalid"})

    def __init__(self, package: Any, bridge: Bridge, info: TargetInfo) -> None:
        from iha_core import AttentionConfig

        self.info = info
        self._package = package
        self._bridge = bridge
        self._make_config = AttentionConfig.from_dict

    def detailed(self, inputs: Inputs, config: dict[str, Any]) -> tuple[Arrays, str | None]:
        stages, kernel = self._package.attention_stages(
            **self._native(inputs), config=self._make_config(config)
        )
        arrays = {stage: self._bridge.to_numpy(value) for stage, value in stages.items()}
        _check_output_dtype(arrays, inputs)
        return arrays, kernel

    def plain(self, inputs: Inputs, config: dict[str, Any]) -> Arrays:
        output = self._package.attention(**self._native(inputs), config=self._make_config(config))
        arrays = {"output": self._bridge.to_numpy(output)}
        _check_output_dtype(arrays, inputs)
        return arrays

    def _native(self, inputs: Inputs) -> dict[str, Any]:
        # A case of bad input may hold something else than arrays; it is for the backend to say so.
        return {
            name: self._bridge.to_native(value) if isinstance(value, np.ndarray) else value
            for name, value in inputs.items()
        }


def _check_output_dtype(arrays: Arrays, inputs: Inputs) -> None:
    """A backend's output has the dtype of q, no wider one either ([TYP-1])."""
    output, q = arrays.get("output"), inputs.get("q")
    # No q to compare with in some cases of bad input: those fail for having been accepted.
    if output is not None and isinstance(q, np.ndarray) and output.dtype != q.dtype:
        raise WrongReturnError(
            f"`output` dtype: expected {q.dtype.name}, that of q ([TYP-1]), got {output.dtype.name}"
        )


def load(name: str, device: str | None) -> BackendAdapter:
    """Import a backend and its framework.

    Raises:
        TargetUnavailable: one of them is missing or broken, or there is no such device.
    """
    backend, _, namespace = name.partition(":")
    package = _import(name, BACKENDS[backend].package)
    framework = _import(name, namespace or BACKENDS[backend].needs[0])
    bridge: Bridge
    if framework.__name__ == "torch":
        where = _torch_device(name, framework, device)
        bridge = TorchBridge(framework, where)
        on, precision = str(where), str(framework.get_float32_matmul_precision())
    else:
        if device not in (None, "cpu"):
            raise TargetUnavailable(f"backend {name!r}: expected device cpu, got {device!r}")
        if not hasattr(framework, "asarray"):
            raise TargetUnavailable(f"backend {name!r}: expected an Array API namespace, which has asarray")
        bridge = NamespaceBridge(framework)
        on, precision = "cpu", "highest" if framework.__name__ in UNROUNDED else UNDECLARED
    version = str(getattr(framework, "__version__", "unknown"))
    info = TargetInfo(
        name=name, framework=framework.__name__, version=version, device=on, precision=precision
    )
    return BackendAdapter(package, bridge, info)


def _import(name: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise TargetUnavailable(f"backend {name!r}: cannot import {module!r}: {describe(error)}") from error


def _torch_device(name: str, torch: Any, device: str | None) -> Any:
    try:
        where = torch.device(device or "cpu")
        torch.zeros(1, device=where)
    except Exception as error:
        raise TargetUnavailable(f"backend {name!r}: no device {device!r}: {describe(error)}") from error
    return where
