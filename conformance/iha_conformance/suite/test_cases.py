"""One test for each target, case and dtype."""

from __future__ import annotations

import pytest

from iha_conformance.protocol import TargetUnavailable
from iha_conformance.suite import plugin
from iha_conformance.suite.session import Node, describe


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not metafunc.config.pluginmanager.hasplugin(plugin.__name__):
        raise pytest.Collector.CollectError(
            f"expected the plugin of the suite, found it not loaded: pytest -p {plugin.__name__}"
        )
    nodes = plugin.suite_session(metafunc.config).nodes
    metafunc.parametrize("iha_node", [pytest.param(node, id=str(node), marks=_marks(node)) for node in nodes])


def _marks(node: Node) -> list[pytest.MarkDecorator]:
    quick = [pytest.mark.iha_quick] if "quick" in node.case.flags else []
    return [*quick, pytest.mark.iha_family(name=node.case.family)]


def test_case(iha_node: Node, pytestconfig: pytest.Config) -> None:
    try:
        row = plugin.suite_session(pytestconfig).run(iha_node)
    except TargetUnavailable as error:
        pytest.fail(str(error), pytrace=False)
    if row.status == "failed":
        pytest.fail(describe(iha_node, row), pytrace=False)
    if row.status != "passed":
        pytest.skip(row.reason or row.status)
