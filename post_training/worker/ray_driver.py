"""The process that speaks with a Ray cluster for one server; the only one on the server's side that loads Ray.

    python -m post_training.worker.ray_driver < commands > events

Commands and events are those of `jobs/launchers/ray_messages.py`. It ends when its standard input does. The actors are
detached: they stay, with their workers, and the next driver finds them by their names.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from post_training.jobs.launchers.ray_messages import (
    COMMANDS,
    Away,
    Begin,
    Connect,
    Connected,
    Kill,
    Pending,
    Place,
    Seen,
    State,
    Terminate,
)
from post_training.worker.ray_node import NodeWorker

LOOK_SECONDS = 20.0
PENDING_SECONDS = 1.0
_KILL_SECONDS = 1.5
_LAST_SECONDS = 5.0
_CALLS_AT_ONCE = 8
_KNOCK_SECONDS = 5.0


class Driver:
    """Does what it is told and says what it sees.

    Args:
        words: the descriptor that events are written to.
    """

    def __init__(self, words: int) -> None:
        self._words = words
        self._speaking = threading.Lock()
        self._actors: dict[str, Any] = {}
        self._last: list[threading.Thread] = []
        self._connected: Connect | None = None

    def run(self) -> None:
        """Until standard input ends, or the cluster cannot be reached."""
        connect = COMMANDS.validate_json(sys.stdin.buffer.readline())
        assert isinstance(connect, Connect)
        try:
            names = self._connect(connect)
        except Exception as error:  # of Ray's own making: ConnectionError, RuntimeError, ValueError, its RPC errors
            self._say(Away(why=_first_line(error)))
            return
        self._say(Connected(workers=names))
        for line in sys.stdin.buffer:
            self._obey(COMMANDS.validate_json(line))
        deadline = time.monotonic() + _LAST_SECONDS
        for thread in self._last:
            thread.join(max(0.0, deadline - time.monotonic()))
        if connect.address == "local":
            ray.shutdown()

    def _connect(self, connect: Connect) -> list[str]:
        _knock(connect.address)
        own: dict[str, Any] = {"num_cpus": connect.local_cpus, "include_dashboard": False}
        ray.init(
            address=connect.address,
            namespace=connect.namespace,
            log_to_driver=False,
            logging_level=logging.ERROR,
            **(own if connect.address == "local" else {}),
        )
        self._connected = connect
        names = ray.util.list_named_actors()
        for name in list(names):
            try:
                self._look_after(name, ray.get_actor(name))
            except ValueError:  # gone meanwhile
                names.remove(name)
        return names

    def _obey(self, command: Connect | Place | Begin | Terminate | Kill) -> None:
        match command:
            case Place():
                self._look_after(command.worker, self._place(command))
            case Begin():
                self._tell(command.worker, "begin", command.order.model_dump_json(), command.threads)
            case Terminate():
                self._tell(command.worker, "terminate")
            case Kill():
                thread = threading.Thread(target=self._kill, args=(command.worker,), daemon=True)
                thread.start()
                self._last.append(thread)
            case Connect():
                raise AssertionError("there is one cluster")

    def _place(self, command: Place) -> Any:
        assert self._connected is not None
        options: Mapping[str, Any] = {
            "num_cpus": command.num_cpus,
            "num_gpus": command.num_gpus,
            "resources": dict(command.resources),
        }
        actor = ray.remote(NodeWorker).options(
            **options, name=command.worker, lifetime="detached", max_restarts=0, max_concurrency=_CALLS_AT_ONCE
        )
        return actor.remote(self._connected.site.model_dump_json())

    def _tell(self, name: str, method: str, *arguments: object) -> None:
        if (actor := self._actors.get(name)) is not None:
            getattr(actor, method).remote(*arguments)

    def _look_after(self, name: str, actor: Any) -> None:
        self._actors[name] = actor
        threading.Thread(target=self._watch, args=(name, actor), daemon=True).start()

    def _watch(self, name: str, actor: Any) -> None:
        """Say what becomes of an actor, until it or its process has ended."""
        seen, number = Seen(), -1
        while seen.ended is None:
            look = actor.look.remote(number, LOOK_SECONDS)
            try:
                while not ray.wait([look], timeout=PENDING_SECONDS)[0]:
                    if seen.node is None:
                        self._say(Pending(worker=name, why=_what_is_missing()))
                latest, text = ray.get(look)
            except ActorUnavailableError:
                time.sleep(PENDING_SECONDS)  # it may come back; if it does not, its lease runs out
                continue
            except RayError as error:
                seen = seen.model_copy(update={"ended": _how_lost(seen, error)})
            else:
                if latest == number:
                    continue
                number, seen = latest, Seen.model_validate_json(text)
            self._say(State(worker=name, seen=seen))
        self._actors.pop(name, None)
        with suppress(RayError, ValueError):
            ray.kill(actor)

    def _kill(self, name: str) -> None:
        actor = self._actors.get(name)
        if actor is None:
            return
        with suppress(RayError):  # out of reach, or not placed
            ray.get(actor.kill.remote(), timeout=_KILL_SECONDS)
        with suppress(RayError, ValueError):
            ray.kill(actor)

    def _say(self, event: Connected | Away | Pending | State) -> None:
        with self._speaking, suppress(OSError):  # where nobody listens any more, standard input ends too
            os.write(self._words, event.line())


def _knock(address: str) -> None:
    """Raise OSError where nobody listens, which Ray itself finds out in minutes."""
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    host, _, port = named.rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK_SECONDS).close()


def _what_is_missing() -> str:
    """Why Ray has not placed an actor, as far as one can see."""
    total, free = ray.cluster_resources(), ray.available_resources()
    counts = ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
    return f"no node of the Ray cluster has room yet; free in all are {counts}"


def _how_lost(seen: Seen, error: RayError) -> str:
    """In words that follow "its worker"."""
    if seen.node is None:
        return f"could not be placed by Ray: {_last_line(error)}"
    with suppress(RayError):
        if any(node["NodeID"] == seen.node_id and not node["Alive"] for node in ray.nodes()):
            return f"was lost with node {seen.node}, which left the Ray cluster"
    return f"was lost with its Ray actor on node {seen.node}"


def _first_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _last_line(error: Exception) -> str:
    return next(reversed(str(error).strip().splitlines()), type(error).__name__)


def main() -> None:
    words = os.dup(1)
    os.dup2(2, 1)  # what Ray prints is no event
    Driver(words).run()


if __name__ == "__main__":
    main()
    # At once: threads may still wait for actors that live on.
    os._exit(0)
