"""Python callables as targets: `MODULE:CALLABLE`, called with NumPy arrays.

    fn(inputs: dict[str, np.ndarray], config: dict) -> np.ndarray | dict[str, np.ndarray]

`inputs` holds the arguments that the case has, in the case's dtype (bfloat16 as
`ml_dtypes.bfloat16`; query_offset is an int or an int64 array), `config` all fields of the
configuration. The result is the output, or any of the stages by name, "output" among them.
`fn.capabilities` may be a set of names, such as {"invalid"}; see `protocol.CAPABILITIES`. One that
declares "gradient" has `fn.vjp(inputs, config, cotangent)`, which returns the gradients of the seven arrays
by name.
"""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from iha_conformance.protocol import CAPABILITIES, UNDECLARED, Inputs, TargetInfo, TargetUnavailable
from iha_conformance.targets.messages import (
    Arrays,
    OutputMissingError,
    RefusedError,
    WrongReturnError,
    describe,
)


class CallableAdapter:
    """A loaded callable."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        capabilities: frozenset[str],
        precision: str | None = None,
    ) -> None:
        self._function = function
        self.capabilities = capabilities
        self.info = TargetInfo(
            name=name,
            framework="python",
            version=platform.python_version(),
            device="cpu",
            precision=precision or UNDECLARED,
        )

    def detailed(self, inputs: Inputs, config: dict[str, Any]) -> tuple[Arrays, None]:
        """Call the function; it has no name for what it ran."""
        return self.plain(inputs, config), None

    def plain(self, inputs: Inputs, config: dict[str, Any]) -> Arrays:
        """Call the function and check that arrays come back."""
        try:
            returned = self._function(dict(inputs), dict(config))
        except NotImplementedError as error:
            raise RefusedError(str(error) or "NotImplementedError") from error
        return as_arrays(returned)

    def gradients(
        self, inputs: Inputs, config: dict[str, Any], cotangent: np.ndarray[Any, Any]
    ) -> tuple[Arrays, None]:
        """Call the function's `vjp` and check that arrays come back."""
        try:
            returned = self._function.vjp(dict(inputs), dict(config), cotangent)  # type: ignore[attr-defined]
        except NotImplementedError as error:
            raise RefusedError(str(error) or "NotImplementedError") from error
        if not isinstance(returned, dict):
            raise WrongReturnError(f"expected a dict of gradients, got {type(returned).__name__}")
        return _checked(returned, "gradients"), None


def as_arrays(returned: object) -> Arrays:
    """What a callable returned, as arrays by stage name; copies, since the callable may reuse its own.

    Raises:
        OutputMissingError: there is no output.
        WrongReturnError: there is something that is not an array of numbers.
    """
    if returned is None:
        raise OutputMissingError("expected the output or a dict of stages, got None")
    stages = returned if isinstance(returned, dict) else {"output": returned}
    if "output" not in stages:
        found = ", ".join(map(repr, stages)) or "nothing"
        raise OutputMissingError(f"expected 'output' among the returned stages, got {found}")
    return _checked(stages, "stages")


def _checked(returned: dict[Any, Any], what: str) -> Arrays:
    arrays: Arrays = {}
    for stage, value in returned.items():
        if not isinstance(stage, str):
            raise WrongReturnError(f"expected {what} by name, got the key {stage!r}")
        if not isinstance(value, np.ndarray):
            raise WrongReturnError(f"`{stage}`: expected a numpy array, got {type(value).__name__}")
        if value.dtype.hasobject or value.dtype.kind in "SUMm" or value.dtype.names:
            raise WrongReturnError(f"`{stage}`: expected an array of numbers, got dtype {value.dtype}")
        arrays[stage] = np.array(value, subok=False)
    return arrays


def load(name: str, directory: str, precision: str | None = None) -> CallableAdapter:
    """Import MODULE:CALLABLE with the directory on the import path; a precision class is declared for it.

    Raises:
        TargetUnavailable: no such module or attribute, an exception at import, or not callable.
    """
    module_name, attribute = split_name(name)
    if directory and directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name + ".").startswith(error.name + "."):
            raise TargetUnavailable(f"target {name!r}: no module named {error.name!r}") from error
        raise TargetUnavailable(f"target {name!r} raised at import: {describe(error)}") from error
    except BaseException as error:  # sys.exit() at import is a fault of the target, too
        raise TargetUnavailable(f"target {name!r} raised at import: {describe(error)}") from error
    path = module_name
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise TargetUnavailable(f"target {name!r}: {path!r} has no attribute {part!r}")
        found = getattr(found, part)
        path += "." + part
    if not callable(found):
        raise TargetUnavailable(f"target {name!r}: expected a callable, got {type(found).__name__}")
    declared = _capabilities(name, getattr(found, "capabilities", ()))
    if "gradient" in declared and not callable(getattr(found, "vjp", None)):
        raise TargetUnavailable(f"target {name!r}: expected a callable vjp, as it declares 'gradient'")
    return CallableAdapter(name, found, declared, precision)


def _capabilities(name: str, declared: object) -> frozenset[str]:
    """What a callable declares, checked: a misspelt name would silently leave out its cases.

    Raises:
        TargetUnavailable: not a collection of known names.
    """
    if isinstance(declared, str) or not isinstance(declared, Collection):
        raise TargetUnavailable(
            f"target {name!r}: expected capabilities to be a set of names, got {declared!r}"
        )
    unknown = [item for item in declared if item not in CAPABILITIES]
    if unknown:
        raise TargetUnavailable(
            f"target {name!r}: expected capabilities among {', '.join(CAPABILITIES)},"
            f" got {', '.join(sorted(map(repr, unknown)))}"
        )
    return frozenset(declared)


def split_name(name: str) -> tuple[str, str]:
    """Module and attribute of MODULE:CALLABLE.

    Raises:
        TargetUnavailable: the name is not of that form.
    """
    module, colon, attribute = name.partition(":")
    identifiers = [*module.split("."), *attribute.split(".")]
    if not colon or not all(part.isidentifier() for part in identifiers):
        raise TargetUnavailable(f"--target: expected MODULE:CALLABLE, got {name!r}")
    return module, attribute
