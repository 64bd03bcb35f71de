"""What a Ray actor does on its node: it runs a worker process, and says of it what the launcher of a server on the same
machine would see. The actor itself never loads torch; the process dies with it.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from importlib.metadata import version
from pathlib import Path

import ray
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

import post_training.jobs.tables  # noqa: F401 - so that the store knows its tables
from apis.errors import PostgradError
from post_training.jobs.database import Database, SchemaRow
from post_training.jobs.launchers.local import WORKER_MODULE, Fit, LocalWorker
from post_training.jobs.launchers.orders import Order
from post_training.jobs.launchers.ray_messages import HOME_MARKER, Seen, Site, machine_identity
from post_training.processes import LIFELINE, process_identity, tied_module, torch_environment

LOOK_SECONDS = 0.1
UNUSED_SECONDS = 150.0
"""Without an order by then the server has forgotten this actor: it gives up an unused one sooner."""
_KEPT_SECONDS = 15.0
"""How long the end of the process can be asked for."""


class NodeWorker:
    """The body of the actor. Its methods may be called at the same time.

    Args:
        site: a `Site` as JSON.
    """

    def __init__(self, site: str) -> None:
        self._site = Site.model_validate_json(site)
        self._changed = threading.Condition()
        self._child: LocalWorker | None = None
        self._lifeline = -1
        self._number = 0
        context = ray.get_runtime_context()
        self._seen = Seen(
            node=ray.util.get_node_ip_address(), node_id=context.get_node_id(), refused=obstacle(self._site)
        )
        self._since = time.monotonic()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def look(self, number: int, seconds: float) -> tuple[int, str]:
        """What is seen now, with its number, as a `Seen` in JSON: once that number is new, or so many seconds later."""
        with self._changed:
            self._changed.wait_for(lambda: self._number != number, seconds)
            return self._number, self._seen.model_dump_json()

    def begin(self, order_json: str, threads: int) -> None:
        """Have a process begin a job: the one that waits, where it fits, else a new one."""
        order = Order.model_validate_json(order_json)
        fit = Fit(str(order.device), threads, order.model_module)
        with self._changed:
            if self._seen.ended is not None:
                return
            try:
                child = self._child_for(order, fit)
            except OSError as error:
                self._see(ended=f"could not be started ({error.strerror})")
                return
            pid = child.process.pid
            took = self._seen.took + 1
            self._see(pid=pid, process_started=process_identity(pid), device=order.device, took=took, idle=False)

    def terminate(self) -> None:
        """Ask the process to save and stop."""
        with self._changed:
            if self._child is not None:
                self._child.terminate()

    def kill(self) -> None:
        """End the process and what it started."""
        with self._changed:
            self._end_child()
            self._see(ended=self._seen.ended or "was ended")

    def _child_for(self, order: Order, fit: Fit) -> LocalWorker:
        if self._child is not None:
            if self._child.fit == fit and self._child.ended() is None and self._child.take(order):
                return self._child
            self._end_child()
        inherited, self._lifeline = os.pipe()
        try:
            with open(order.log, "ab") as log:
                process = subprocess.Popen(
                    [*tied_module(WORKER_MODULE), "--home", self._site.home],
                    env={**torch_environment(fit.threads), "PYTHONUNBUFFERED": "1", LIFELINE: str(inherited)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                    pass_fds=(inherited,),
                )
        finally:
            os.close(inherited)
        self._child = LocalWorker(process, fit)
        self._child.send(order)
        return self._child

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def _watch(self) -> None:
        while not self._over():
            time.sleep(LOOK_SECONDS)
            with self._changed:
                self._look_at_child()
        os._exit(0)

    def _look_at_child(self) -> None:
        if self._child is None:
            return
        how = self._child.ended()
        if how is not None:
            self._end_child()
            self._see(ended=how)
        elif self._child.idle() != self._seen.idle:
            self._see(idle=not self._seen.idle)

    def _over(self) -> bool:
        """Whether there is nothing left that anybody could want of this actor."""
        waited = time.monotonic() - self._since
        if self._seen.ended is not None:
            return waited > _KEPT_SECONDS
        return self._child is None and waited > UNUSED_SECONDS

    def _see(self, **changes: object) -> None:
        self._seen = self._seen.model_copy(update=changes)
        self._number += 1
        self._since = time.monotonic()
        self._changed.notify_all()


def obstacle(site: Site) -> str | None:
    """Why no worker may run here, in words for the administrator; None where it may."""
    here = f"node {ray.util.get_node_ip_address()}"
    if (mine := version("postgrad")) != site.version:
        return f"{here} has Postgrad {mine}, the server has {site.version}"
    try:
        marker = (Path(site.home) / HOME_MARKER).read_text(encoding="ascii")
    except OSError:
        marker = ""
    if marker != site.home_id:
        return (
            f"{here} does not see the server's state folder at {site.home}: mount the same folder there on every node"
        )
    if not os.access(site.home, os.R_OK | os.W_OK | os.X_OK):
        return f"{here} may not write to the state folder {site.home}: run Ray there as the server's user"
    if site.database_url.startswith("sqlite") and machine_identity() != site.machine:
        return f"{here} is another machine, and SQLite serves one: name a PostgreSQL server as metadata_store"
    return None if _store_answers(site.database_url) else f"{here} cannot reach the job store; see the log of Ray there"


def _store_answers(url: str) -> bool:
    database: Database | None = None
    try:
        database = Database(url)
        with database.reading() as session:
            return session.scalar(select(SchemaRow.version)) is not None
    except (SQLAlchemyError, PostgradError, OSError) as error:
        print(f"the job store cannot be reached: {type(error).__name__}: {error}", flush=True)
        return False
    finally:
        if database is not None:
            database.close()
