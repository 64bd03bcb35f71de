"""PostgreSQL clusters for tests: in a temporary folder, on a Unix socket in it, gone with the tests' process."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

_SETTINGS = {
    "listen_addresses": "",
    # A test kills the server, never the machine: what was handed to the kernel is not lost.
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "16MB",
    "dynamic_shared_memory_type": "mmap",
    "max_connections": "200",
    "autovacuum": "off",
    "jit": "off",
}
# Ends the cluster once its standard input is closed: by `close`, or by the kernel when the tests' process is gone.
_WATCHER = 'cat >/dev/null; "$0/pg_ctl" stop -D "$1/data" -m immediate >/dev/null 2>&1; rm -rf "$1"'


class Cluster:
    """One cluster. Its databases are reached by the URLs of `create_database`.

    Args:
        binaries: the folder of `initdb` and `pg_ctl`.
        folder: an empty folder; removed by `close`.
        user: the account that owns and runs the cluster; None for this process's own.
    """

    def __init__(self, binaries: Path, folder: Path, user: str | None) -> None:
        self.binaries = binaries
        self.folder = folder
        self._account: dict[str, Any] = {}
        if user is not None:
            entry = pwd.getpwnam(user)
            os.chown(folder, entry.pw_uid, entry.pw_gid)
            self._account = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        # In a session of its own, where no Ctrl-C for the tests ends the shell before its work is done.
        self._watcher = subprocess.Popen(
            ["sh", "-c", _WATCHER, str(binaries), str(folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            cwd="/",
            **self._account,
        )

    def create(self) -> None:
        """Make the cluster's files and start its server."""
        self._run("initdb", "-D", str(self.folder / "data"), "-U", "postgrad", "-A", "trust", "-E", "UTF8", "--no-sync")
        settings = "".join(f"{name} = '{value}'\n" for name, value in _SETTINGS.items())
        configuration = self.folder / "data" / "postgresql.conf"
        configuration.write_text(f"{configuration.read_text()}\n{settings}unix_socket_directories = '{self.folder}'\n")
        self.start()

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://postgrad@/{database}?host={self.folder}"

    def create_database(self, template: str = "template0") -> str:
        """The URL of a new database: an empty one, or a copy of the database `template`."""
        name = f"test_{uuid.uuid4().hex}"
        self.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return self.url(name)

    def drop_database(self, url: str) -> None:
        """Cut off whoever is still connected, and drop it."""
        name = url.partition("?")[0].rpartition("/")[2]
        self.execute(f'DROP DATABASE "{name}" WITH (FORCE)')

    def execute(self, statement: str) -> None:
        engine = create_engine(
            self.url().replace("postgresql://", "postgresql+psycopg://"), isolation_level="AUTOCOMMIT"
        )
        try:
            with engine.connect() as connection:
                connection.execute(text(statement))
        finally:
            engine.dispose()

    def start(self) -> None:
        log = self.folder / "server.log"
        self._run("pg_ctl", "start", "-D", str(self.folder / "data"), "-l", str(log), "-w", "-t", "60")

    def stop(self, *, immediate: bool = False) -> None:
        """Stop the server; `immediate` is what a crash is to its clients, and makes the next start recover."""
        mode = "immediate" if immediate else "fast"
        self._run("pg_ctl", "stop", "-D", str(self.folder / "data"), "-m", mode, "-w", "-t", "60")

    def restart(self, *, immediate: bool = False) -> None:
        self.stop(immediate=immediate)
        self.start()

    def close(self) -> None:
        assert self._watcher.stdin is not None
        self._watcher.stdin.close()
        self._watcher.wait(60)

    def _run(self, program: str, *arguments: str) -> None:
        environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}
        # To a file: the server that pg_ctl leaves behind would keep a pipe open.
        with tempfile.TemporaryFile("w+") as output:
            done = subprocess.run(
                [str(self.binaries / program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd="/",
                check=False,
                **self._account,
            )
            output.seek(0)
            assert done.returncode == 0, f"{program} failed:\n{output.read()}"


def find_binaries() -> Path | None:
    """The folder of the newest PostgreSQL server's programs; None where there is none."""
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent
    folders = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    return max(folders, key=lambda folder: float(folder.parent.name), default=None)


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """A cluster for the length of the block. Skips where there is no PostgreSQL server, or nobody to run it as."""
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("there is no PostgreSQL server: neither initdb in PATH nor /usr/lib/postgresql/*/bin/initdb")
    user = _unprivileged_user() if os.geteuid() == 0 else None
    cluster = Cluster(binaries, Path(tempfile.mkdtemp(prefix="postgrad-pg-")), user)
    try:
        cluster.create()
        yield cluster
    finally:
        cluster.close()


def _unprivileged_user() -> str:
    # PostgreSQL refuses to run as root.
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    pytest.skip("this is root, and there is neither a user postgres nor nobody to run PostgreSQL as")
