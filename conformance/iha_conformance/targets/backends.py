"""The backends of this project as targets, and what is known about them without importing any.

An adapter pairs a backend package with the bridge to its framework.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np

from iha_conformance.protocol import Inputs, TargetInfo, TargetUnavailable
from iha_conformance.targets.bridges import BRIDGES, Bridge, NamespaceBridge
from iha_conformance.targets.messages import Arrays, Function, WrongReturnError, describe

ARRAY_API = "array-api"
NAMESPACES = ("numpy", "array_api_strict", "torch")
"""Array API namespaces that `--backend array-api` means, where they are installed."""


@dataclasses.dataclass(frozen=True)
class Backend:
    """A backend's package, and the modules that must be there for it, framework first.

    `variants` are further targets, named backend:variant: implementations that run only when asked for,
    since they do not take every case.
    """

    package: str
    needs: tuple[str, ...]
    variants: tuple[str, ...] = ()


BACKENDS: Mapping[str, Backend] = {
    "torch": Backend("iha_torch", ("torch",)),
    "jax": Backend("iha_jax", ("jax",), variants=("splash",)),
    "mlx": Backend("iha_mlx", ("mlx.core",)),
    ARRAY_API: Backend("iha_array_api", ("array_api_compat",)),
}


# Discovery, in the parent process


def known_targets() -> tuple[str, ...]:
    """Names of the built-in targets that run unless others are asked for, installed or not."""
    single = [name for name in BACKENDS if name != ARRAY_API]
    return (*single, *(f"{ARRAY_API}:{namespace}" for namespace in NAMESPACES))


def all_targets() -> tuple[str, ...]:
    """Names of all built-in targets, those that run only when asked for too."""
    variants = [f"{name}:{variant}" for name, backend in BACKENDS.items() for variant in backend.variants]
    return (*BACKENDS, *variants, *(name for name in known_targets() if name not in BACKENDS))


def is_known(name: str) -> bool:
    """Whether that is the canonical name of a built-in target, or array-api for all of its namespaces."""
    backend, colon, rest = name.partition(":")
    if backend not in BACKENDS or (colon and not rest):
        return False
    return not colon or backend == ARRAY_API or rest in BACKENDS[backend].variants


def canonical_name(name: str) -> str:
    """A target's name with its namespace spelled as a module: array-api-strict is array_api_strict."""
    backend, colon, namespace = name.partition(":")
    return backend + colon + namespace.replace("-", "_")


def missing_module(name: str) -> str | None:
    """The module that a built-in target lacks, or None if all are there; imports none of them."""
    backend, _, rest = name.partition(":")
    entry = BACKENDS[backend]
    modules: list[str] = [rest] if backend == ARRAY_API and rest else []
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
    backend, _, rest = name.partition(":")
    return backend != ARRAY_API or rest == "torch"


# Adapters, in the worker process


class BackendAdapter:
    """A backend package with `attention` and `attention_stages`, and the bridge to its framework."""

    def __init__(self, package: Any, bridge: Bridge, info: TargetInfo) -> None:
        from iha_core import AttentionConfig

        self.info = info
        self._package = package
        self._bridge = bridge
        self._make_config = AttentionConfig.from_dict
        self.capabilities = frozenset({"invalid", "gradient"} if bridge.differentiates else {"invalid"})

    def detailed(self, inputs: Inputs, config: dict[str, Any]) -> tuple[Arrays, str | None]:
        if self._bridge.compiles_once(inputs):
            stages, kernel = self._call(self._output_and_kernel, inputs, config)
        else:
            package = self._package
            stages, kernel = self._call(package.attention_stages, inputs, config, then=package.attention)
        arrays = {stage: self._bridge.to_numpy(value) for stage, value in stages.items()}
        _check_output_dtype(arrays, inputs)
        return arrays, kernel

    def plain(self, inputs: Inputs, config: dict[str, Any]) -> Arrays:
        if self._bridge.compiles_once(inputs):
            output = self._call(self._output_and_kernel, inputs, config)[0]["output"]
        else:
            output = self._call(self._package.attention, inputs, config)
        arrays = {"output": self._bridge.to_numpy(output)}
        _check_output_dtype(arrays, inputs)
        return arrays

    def gradients(
        self, inputs: Inputs, config: dict[str, Any], cotangent: np.ndarray[Any, Any]
    ) -> tuple[Arrays, str | None]:
        """Gradients by argument, through the framework's own differentiation."""
        arguments = self._native(inputs)
        found, kernel = self._bridge.gradients(
            self._package.attention_stages,
            arguments,
            self._make_config(config),
            self._bridge.to_native(cotangent),
        )
        arrays = {name: self._bridge.to_numpy(value) for name, value in found.items()}
        for name, array in arrays.items():
            if array.dtype != inputs[name].dtype:
                raise WrongReturnError(
                    f"gradient of `{name}` dtype: expected {inputs[name].dtype.name}, that of {name}"
                    f" ([GRAD-9]), got {array.dtype.name}"
                )
        return arrays, f"derivative of {kernel}"

    def _output_and_kernel(self, **arguments: Any) -> tuple[dict[str, Any], str]:
        stages, kernel = self._package.attention_stages(**arguments)
        return {"output": stages["output"]}, kernel

    def _call(
        self, function: Function, inputs: Inputs, config: dict[str, Any], then: Function | None = None
    ) -> Any:
        return self._bridge.call(function, self._native(inputs), self._make_config(config), then)

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


def load(name: str, device: str | None = None, precision: str | None = None) -> BackendAdapter:
    """Import a backend and its framework.

    Raises:
        TargetUnavailable: one of them is missing or broken, or there is no such device.
    """
    backend, _, rest = name.partition(":")
    package = _import(name, BACKENDS[backend].package)
    framework = _import(name, rest if backend == ARRAY_API else BACKENDS[backend].needs[0])
    module = framework.__name__.partition(".")[0]
    options = {"implementation": rest} if rest in BACKENDS[backend].variants else {}
    try:
        bridge = BRIDGES.get(framework.__name__, NamespaceBridge)(framework, device, precision, **options)
    except TargetUnavailable as error:
        raise TargetUnavailable(f"backend {name!r}: {error}") from error
    info = TargetInfo(
        name=name,
        framework=module,
        version=_version(framework, module),
        device=bridge.device,
        precision=bridge.precision,
    )
    return BackendAdapter(package, bridge, info)


def _version(framework: Any, module: str) -> str:
    found = getattr(framework, "__version__", None)
    if found is None:
        try:
            found = importlib.metadata.version(module)
        except importlib.metadata.PackageNotFoundError:
            found = "unknown"
    return str(found)


def _import(name: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise TargetUnavailable(f"backend {name!r}: cannot import {module!r}: {describe(error)}") from error
