"""The clients of the matrix: version, Python, drivers, and what each needs to install and run today."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ALL = bool(os.environ.get("POSTGRAD_ALL_CLIENTS"))
"""Every client, as `make test-clients` runs them."""
CONSTRAINTS = Path(__file__).parent / "constraints.txt"


@dataclass(frozen=True)
class Client:
    """One client from PyPI.

    Attributes:
        requirements: what is installed, exactly pinned; `constraints.txt` pins what these depend on.
        drivers: file of the driver in `drivers/`, by what it drives: sdk or cli.
        always: whether the ordinary tests run it, not only `make test-clients`.
        without_cli: why no command line is driven.
    """

    name: str
    python: tuple[int, int]
    requirements: tuple[str, ...]
    drivers: dict[str, str]
    always: bool = False
    without_cli: str = ""

    @property
    def key(self) -> str:
        """Names the environment: another pin makes another one."""
        pins = "\n".join([*self.requirements, CONSTRAINTS.read_text()])
        return f"{self.name}-py{self.python[0]}{self.python[1]}-{hashlib.sha256(pins.encode()).hexdigest()[:10]}"


@dataclass(frozen=True)
class Cell:
    """One client by one of its faces."""

    client: Client
    face: str

    @property
    def name(self) -> str:
        return f"{self.client.name}-{self.face}"


def _llama_stack(version: str, python: tuple[int, int], drivers: dict[str, str], *more: str, **options: Any) -> Client:
    return Client(version, python, (f"llama-stack-client=={version}", *more), drivers, **options)


_V1 = {"sdk": "sdk_v1.py", "cli": "cli.py"}
_BROKEN = "its commands fail in the client itself"
CLIENTS = (
    _llama_stack("0.0.61", (3, 11), {"sdk": "sdk_alpha.py"}, without_cli="it has none for post-training"),
    _llama_stack("0.0.63", (3, 11), {"sdk": "sdk_alpha.py"}, without_cli="it imports what it does not install"),
    _llama_stack("0.1.0", (3, 11), _V1),
    _llama_stack("0.1.9", (3, 11), _V1),
    _llama_stack("0.2.7", (3, 11), _V1, always=True),
    # Imports both, and declares neither.
    _llama_stack("0.2.12", (3, 11), _V1, "fire==0.7.1", "requests==2.34.2"),
    _llama_stack("0.2.23", (3, 12), _V1, always=True),
    _llama_stack("0.3.5", (3, 12), {"sdk": "sdk_v1alpha.py", "cli": "cli.py"}),
    _llama_stack("0.4.0", (3, 12), {"sdk": "sdk_v1alpha.py"}, without_cli=_BROKEN),
    _llama_stack("0.7.0", (3, 12), {"sdk": "sdk_v1alpha.py"}, always=True, without_cli=_BROKEN),
    Client("openai", (3, 11), ("openai==3.57.0",), {"sdk": "openai_package.py"}, without_cli="it has none"),
)


def cells() -> Iterator[Cell]:
    for client in CLIENTS:
        for face in client.drivers:
            yield Cell(client, face)
