"""What the cells of the matrix came to, and the table that is printed of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.clients.matrix import CLIENTS, Cell


class Results:
    """One result a cell: `passed`, `FAILED` or `skipped`, and the verbs or the reason."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[str, str]] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def skipped(self, cell: Cell, reason: str) -> None:
        self._of[cell.name] = ("skipped", reason)

    def started(self, cell: Cell) -> None:
        self._of[cell.name] = ("FAILED", "the driver did not come to its end")

    def ran(self, cell: Cell, steps: list[dict[str, Any]], faults: list[str]) -> None:
        """The steps that a driver reported, and what was wrong."""
        by_http = [step["verb"] for step in steps if step["by"] == "http"]
        told = f"{len(steps)} verbs" + (f"; by plain HTTP: {', '.join(by_http)}" if by_http else "")
        self._of[cell.name] = ("FAILED", f"{told}; {faults[0]}") if faults else ("passed", told)

    def table(self) -> Iterator[str]:
        """A line for each face of each client."""
        yield f"{'client':<8} {'Python':<6} {'face':<4} {'result':<8} verbs"
        for client in CLIENTS:
            named = f"{client.name:<8} {client.python[0]}.{client.python[1]:<4}"
            for face in ("sdk", "cli"):
                missing = ("–", client.without_cli) if face not in client.drivers else ("not run", "")
                result, told = self._of.get(Cell(client, face).name, missing)
                yield f"{named} {face.upper():<4} {result:<8} {told}".rstrip()
                named = " " * len(named)
