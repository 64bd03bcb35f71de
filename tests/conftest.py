"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from post_training.jobs.database import Database
from tests.model_fixture import smollm2
from tests.postgres import Cluster, running_cluster

# Tests run models in several processes at once: threads that spin would take the cores from each other.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shell starts what it runs in the background with Ctrl-C ignored, and children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

__all__ = ["smollm2"]

_MIGRATED = "migrated"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("postgrad")
    group.addoption(
        "--provider",
        action="append",
        metavar="TYPE[@PACKAGE]",
        help="tests/conformance: hold this installed provider to its promises in place of those here; may be repeated",
    )
    group.addoption("--provider-model", metavar="FOLDER", help="tests/conformance: the Hugging Face model it trains")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Cluster]:
    """The cluster that all tests share; it holds a migrated database to copy."""
    with running_cluster() as cluster:
        cluster.execute(f"CREATE DATABASE {_MIGRATED} TEMPLATE template0")
        database = Database(cluster.url(_MIGRATED))
        database.migrate()
        database.close()
        yield cluster


@pytest.fixture
def postgres_cluster() -> Iterator[Cluster]:
    """A cluster of this test's own, to stop and kill."""
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty store, in SQLite and in PostgreSQL."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'store.db'}"
        return
    cluster: Cluster = request.getfixturevalue("postgres_server")
    url = cluster.create_database()
    yield url
    cluster.drop_database(url)


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A migrated store without jobs, in SQLite and in PostgreSQL."""
    if request.param == "sqlite":
        database = Database(f"sqlite:///{tmp_path / 'store.db'}")
        database.migrate()
        yield database
        database.close()
        return
    cluster: Cluster = request.getfixturevalue("postgres_server")
    database = Database(cluster.create_database(_MIGRATED))
    yield database
    database.close()
    cluster.drop_database(database.url)
