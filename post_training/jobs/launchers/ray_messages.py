"""What a server and its Ray driver say to each other: one JSON line for each command and each thing seen.

The driver is a process of its own (`post_training.worker.ray_driver`): Ray's library may block for minutes and ends its
process when a cluster is gone for long, and a server must do neither.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from post_training.jobs.launchers.orders import Order

HOME_MARKER = ".home_id"
"""The file in a state folder by which a node knows that it sees the same one."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")

    def line(self) -> bytes:
        return self.model_dump_json().encode() + b"\n"


class Site(_Message):
    """What a node must share with the server.

    Attributes:
        home, home_id: the state folder and what its marker file holds.
        database_url: the store.
        machine: the server's, as `machine_identity` names it.
        version: Postgrad's.
    """

    home: str
    home_id: str
    database_url: str
    machine: str
    version: str


class Connect(_Message):
    """The first line: which cluster.

    Attributes:
        address: `auto`, `local` or `host:port`.
        namespace: of the actors' names; one for each state folder.
        local_cpus: CPUs that a `local` cluster says it has.
    """

    do: Literal["connect"] = "connect"
    address: str
    namespace: str
    local_cpus: int
    site: Site


class Place(_Message):
    """Have Ray place an actor, under a name, where so much is free."""

    do: Literal["place"] = "place"
    worker: str
    num_cpus: int
    num_gpus: float
    resources: Mapping[str, float]


class Begin(_Message):
    """Have a worker process on the actor's node begin a job."""

    do: Literal["begin"] = "begin"
    worker: str
    order: Order
    threads: int


class Terminate(_Message):
    """Ask a worker process to save, give its job back and stop."""

    do: Literal["terminate"] = "terminate"
    worker: str


class Kill(_Message):
    """End a worker process at once, and its actor."""

    do: Literal["kill"] = "kill"
    worker: str


Command = Annotated[Connect | Place | Begin | Terminate | Kill, Field(discriminator="do")]


class Connected(_Message):
    """The cluster answers; `workers` are the names of all actors of this state folder that live there."""

    say: Literal["connected"] = "connected"
    workers: list[str]


class Away(_Message):
    """The cluster does not answer; the driver ends."""

    say: Literal["away"] = "away"
    why: str


class Pending(_Message):
    """Ray has not placed an actor yet."""

    say: Literal["pending"] = "pending"
    worker: str
    why: str


class Seen(_Message):
    """A worker as its actor sees it.

    Attributes:
        node, node_id: the address of its node and Ray's id of it; None where it has none yet.
        refused: why no worker may run on this node.
        pid, process_started: the worker process, as `process_identity` names it; None before the first order.
        device: of the latest order.
        took: orders begun.
        idle: it has ended its job in good order and waits for another.
        ended: how it ended, in words that follow "its worker"; None while it runs.
    """

    node: str | None = None
    node_id: str | None = None
    refused: str | None = None
    pid: int | None = None
    process_started: str | None = None
    device: str | None = None
    took: int = 0
    idle: bool = False
    ended: str | None = None


class State(_Message):
    say: Literal["state"] = "state"
    worker: str
    seen: Seen


Event = Annotated[Connected | Away | Pending | State, Field(discriminator="say")]
COMMANDS: TypeAdapter[Connect | Place | Begin | Terminate | Kill] = TypeAdapter(Command)
EVENTS: TypeAdapter[Connected | Away | Pending | State] = TypeAdapter(Event)


def machine_identity() -> str:
    """Tells a machine from every other, for as long as it runs; its containers have it in common."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
