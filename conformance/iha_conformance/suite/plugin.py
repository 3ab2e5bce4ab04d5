"""The options of the suite under pytest.

An entry point of the distribution, since pytest looks for options before it knows what --pyargs
names, and so never sees a conftest.py of this package in time. Every pytest of the environment loads it:
it imports nothing but pytest and the standard library until one of its options or the suite is used.
"""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from iha_conformance.suite.session import SuiteSession

OPTIONS = ("iha_target", "iha_device", "iha_precision")
"""Options whose values only the kit can check."""

SESSION = pytest.StashKey["SuiteSession"]()
FAULT = pytest.StashKey[pytest.UsageError]()
"""What the session is, or why there is none: pytest would report the latter as a fault of collection."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("iha", "Interleaved Head Attention: pytest --pyargs iha_conformance.suite")
    group.addoption(
        "--iha-target",
        action="append",
        default=[],
        metavar="NAME|MODULE:CALLABLE",
        help="What to test, as for --backend and --target of `iha run`. Repeatable. Default: every installed"
        " backend.",
    )
    group.addoption(
        "--iha-device", metavar="NAME", help="Device of the backends, such as cuda. Default: cpu."
    )
    group.addoption(
        "--iha-precision", metavar="CLASS", help="Precision class of the products, as for `iha run`."
    )
    group.addoption(
        "--iha-timeout",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="Time for one case, which is computed twice. Default: 60.",
    )
    group.addoption("--iha-quick", action="store_true", help="Only the quick cases.")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 86400:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, up to 86400, got {text!r}")
    return seconds


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "iha_quick: a quick case of the conformance suite")
    config.addinivalue_line("markers", "iha_family(name): family of a case of the conformance suite")
    if any(config.getoption(option) for option in OPTIONS):  # errors of usage come before all else
        suite_session(config)


def suite_session(config: pytest.Config) -> SuiteSession:
    """The targets and cases of this pytest session, made when first asked for.

    Raises:
        pytest.UsageError: the options name something that does not exist.
    """
    if SESSION not in config.stash:
        from iha_conformance.suite.session import SuiteSession

        try:
            session = SuiteSession(config)
        except pytest.UsageError as error:
            config.stash[FAULT] = error
            raise
        config.add_cleanup(session.close)
        config.stash[SESSION] = session
    return config.stash[SESSION]


def pytest_sessionstart(session: pytest.Session) -> None:
    # With pytest-xdist the controller collects nothing, and an error of usage in one of its workers
    # would be a crash: targets that were asked for are tried here.
    config = session.config
    if config.pluginmanager.hasplugin("dsession") and config.getoption("iha_target"):
        suite_session(config).load_all()


def pytest_collection_finish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist loads what it is sent tests for
        return
    if FAULT in config.stash:
        raise config.stash[FAULT]
    if SESSION in config.stash and not config.option.collectonly:
        config.stash[SESSION].load_for(session.items)
