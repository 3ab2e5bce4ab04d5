"""The one family of errors that every backend raises for bad input.

Each error is a single line that names the argument, what was expected and what was found
(SPEC.md [ERR-1]). Catch `IHAError` for all of them, or the built-in class that each also is.
"""

from __future__ import annotations

MAX_FOUND = 200
"""Characters of what was found; the rest of a longer text is cut."""


class IHAError(Exception):
    """Base of all errors raised for bad input.

    Attributes:
        argument: name of the offending argument, as in the signature of `attention`
            or a field of `AttentionConfig`.
    """

    def __init__(self, argument: str, what: str, *, expected: str, found: str) -> None:
        self.argument = argument
        subject = f"`{argument}` {what}".rstrip()
        if len(found) > MAX_FOUND:
            found = found[:MAX_FOUND] + "..."
        super().__init__(" ".join(f"{subject}: expected {expected}, got {found}".split()))


class ShapeError(IHAError, ValueError):
    """An array has the wrong rank or size."""


class ArgumentValueError(IHAError, ValueError):
    """An argument or a combination of arguments has a value that is not allowed."""


class ConfigError(IHAError, ValueError):
    """A field of the configuration has a value that is not allowed."""


class ArgumentTypeError(IHAError, TypeError):
    """An argument or a field of the configuration is of the wrong type."""


class DTypeError(IHAError, TypeError):
    """An array has a dtype that is not allowed, or that does not go with the others."""
