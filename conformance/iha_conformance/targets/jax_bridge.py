"""The bridge to JAX, which compiles every function for every combination of shapes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from iha_conformance.protocol import TargetUnavailable
from iha_conformance.targets.messages import Function, RefusedError, describe
from iha_core import GRADIENTS

QUICK_CODE = {"xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": 0}
"""Options of XLA that spare three quarters of the time that it takes for a CPU.

They go with `JaxBridge.compiles_once`: hundreds of functions in four dtypes would take a machine of two
cores longer than anybody waits.
"""

KEPT = 64
"""Compiled functions that are kept in memory: cases that share shapes and configuration are neighbours."""


class JaxBridge:
    """JAX, on any of its devices; what runs is a backend's function compiled whole, as users' programs are.

    On a CPU that is so in float32; the other dtypes are compiled with less effort (`compiles_once`).

    Float64 is enabled for just the calls that have it. `implementation` is passed on to the backend.
    """

    WORDS: Mapping[str, str] = {
        "highest": "highest",
        "tf32": "tensorfloat32",
        "bf16x3": "bfloat16_3x",
        "bf16x1": "bfloat16",
    }
    """JAX's own word for the products of a precision class."""

    def __init__(
        self,
        jax: Any,
        device: str | None = None,
        precision: str | None = None,
        implementation: str | None = None,
    ) -> None:
        self._jax = jax
        try:
            self._device = jax.devices(device or "cpu")[0]
        except Exception as error:
            raise TargetUnavailable(f"no device {device!r}: {describe(error)}") from error
        self.device = device or "cpu"
        self.precision = precision or "highest"  # what iha_jax asks for, whatever the ambient default
        self._options: dict[str, str] = {}
        if precision is not None:
            self._options["precision"] = self.WORDS[precision]
        if implementation is not None:
            self._options["implementation"] = implementation
        self._compilers = ThreadPoolExecutor(2)
        self._compilations: dict[Any, Future[Function]] = {}
        self._derivatives: dict[Function, Function] = {}
        _keep_on_disk(jax)

    def to_native(self, array: np.ndarray[Any, Any]) -> Any:
        """The same values in JAX's own layout; integers of 64 bits in 32, the widest that JAX always has."""
        if array.dtype == np.int64:
            narrow = array.astype(np.int32)
            if not np.array_equal(narrow, array):
                raise RefusedError("jax has no int64 unless it is enabled")
            array = narrow
        with self._jax.enable_x64(array.dtype == np.float64):
            return self._jax.device_put(np.ascontiguousarray(array), self._device)

    def to_numpy(self, native: Any) -> np.ndarray[Any, Any]:
        return np.array(native)

    def compiles_once(self, inputs: Mapping[str, Any]) -> bool:
        """On a CPU, in all dtypes but float32, the one that is compiled just as users do it."""
        dtypes = {x.dtype.name for x in inputs.values() if hasattr(x, "dtype")}
        return self._device.platform == "cpu" and not dtypes.isdisjoint(("float64", "float16", "bfloat16"))

    def call(
        self, function: Function, arguments: Mapping[str, Any], config: Any, then: Function | None = None
    ) -> Any:
        arrays = {name: x for name, x in arguments.items() if isinstance(x, self._jax.Array)}
        rest = {name: x for name, x in arguments.items() if name not in arrays}
        if not all(isinstance(x, int) for x in rest.values()):
            # Bad input, which may not even be hashable.
            return function(**arguments, config=config, **self._options)
        static = {"config": config, **self._options, **rest}
        compilations = [self._compilation(f, arrays, static) for f in (function, then) if f is not None]
        try:
            compiled = compilations[0].result()
        except NotImplementedError as error:
            if "implementation" in self._options:  # asked for by name, and known not to take every case
                raise RefusedError(str(error)) from error
            raise
        return compiled(arrays)

    @property
    def differentiates(self) -> bool:
        """An implementation that is asked for by name need not."""
        return "implementation" not in self._options

    def gradients(
        self, stages: Function, arguments: Mapping[str, Any], config: Any, cotangent: Any
    ) -> tuple[dict[str, Any], str]:
        if stages not in self._derivatives:
            self._derivatives[stages] = self._derivative(stages)
        found: tuple[dict[str, Any], str] = self.call(
            self._derivatives[stages], {**arguments, "cotangent": cotangent}, config
        )
        return found

    def _derivative(self, stages: Function) -> Function:
        """The derivative of a backend's function, as one to compile."""

        def derivative(*, cotangent: Any, **arguments: Any) -> tuple[dict[str, Any], str]:
            floats = {name: arguments.pop(name) for name in GRADIENTS}
            kernels: list[str] = []

            def output(floats: dict[str, Any]) -> Any:
                found, kernel = stages(**floats, **arguments)
                kernels.append(kernel)
                return found["output"]

            _, pull = self._jax.vjp(output, floats)
            return pull(cotangent)[0], kernels[0]

        return derivative

    def _compilation(
        self, function: Function, arrays: Mapping[str, Any], static: Mapping[str, Any]
    ) -> Future[Function]:
        """The function compiled for such arguments, now or soon: compilers work beside each other."""
        types = tuple((name, self._jax.typeof(x)) for name, x in arrays.items())
        key = (function, types, tuple(static.items()))
        if key not in self._compilations:
            if len(self._compilations) >= KEPT:
                del self._compilations[next(iter(self._compilations))]
            self._compilations[key] = self._compilers.submit(self._compile, function, arrays, static)
        return self._compilations[key]

    def _compile(self, function: Function, arrays: Mapping[str, Any], static: Mapping[str, Any]) -> Function:
        jax = self._jax
        # Compiled functions return arrays only: texts, such as a kernel's name, are kept from the trace.
        structure: Any = None
        texts: dict[int, str] = {}

        def only_arrays(arrays: Mapping[str, Any]) -> list[Any]:
            nonlocal structure
            leaves, structure = jax.tree.flatten(function(**arrays, **static))
            texts.update((i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, str))
            return [leaf for leaf in leaves if not isinstance(leaf, str)]

        options = QUICK_CODE if self.compiles_once(arrays) else {}
        with jax.enable_x64(any(x.dtype == np.float64 for x in arrays.values())):
            compiled = jax.jit(only_arrays).lower(arrays).compile(options)

        def run(arrays: Mapping[str, Any]) -> Any:
            results = iter(compiled(arrays))
            leaves = [texts[i] if i in texts else next(results) for i in range(structure.num_leaves)]
            return jax.tree.unflatten(structure, leaves)

        return run


def _keep_on_disk(jax: Any) -> None:
    """Have JAX keep what it compiles for later runs, in the user's folder of caches unless it has one."""
    if jax.config.jax_compilation_cache_dir is None:
        caches = os.environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(caches):
            caches = os.path.expanduser("~/.cache")
        jax.config.update("jax_compilation_cache_dir", os.path.join(caches, "iha", "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
