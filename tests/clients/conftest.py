"""One live server for every client, and the table of what came of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from post_training.catalog.importing import import_model
from post_training.client import StackClient
from tests.clients.results import Results
from tests.clients.task import BASE
from tests.served_stack import served
from tests.tiny_llama import save_tiny_llama

_RESULTS = pytest.StashKey[Results]()


@dataclass(frozen=True)
class Served:
    """A running stack with one tiny base model."""

    url: str
    client: StackClient
    home: Path


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("clients")
    home = folder / "home"
    import_model(str(save_tiny_llama(folder / "model" / "tiny", context=256)), BASE, home)
    with served(home) as (url, _), StackClient(url) as client:
        yield Served(url, client, home)


@pytest.fixture(scope="session")
def results(pytestconfig: pytest.Config) -> Results:
    return pytestconfig.stash.setdefault(_RESULTS, Results())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table, where any client ran."""
    if found := config.stash.get(_RESULTS, None):
        terminalreporter.section("clients")
        for line in found.table():
            terminalreporter.write_line(line)
