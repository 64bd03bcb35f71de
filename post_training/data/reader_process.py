"""Rows that a short-lived process reads, so that neither the server nor this floor imports `datasets`, `pyarrow` or
`openpyxl`."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO

from apis.datasets.models import Row
from apis.errors import DataInvalid, InvalidField, PostgradError, Unavailable
from post_training.data.records import parse_json_lines
from post_training.processes import LIFELINE, tied_module, torch_environment

READER_MODULE = "post_training.worker.hf_sources"
# The process has this long for each thousand rows. A request reads a dozen at most, so it waits no longer than that.
READER_SECONDS = 120.0
_ROWS = 1000
_CHUNK_BYTES = 2**16
_PARAM = "source.uri"


@dataclass(frozen=True)
class Kind:
    """What is read, what to do where that takes too long, and which module reads it (None: `READER_MODULE`)."""

    name: str
    too_slow: str
    module: str | None = None


HUB = Kind("the hub", "try again later, or download the data set and register its files")
PARQUET = Kind("the parquet file", "write it with smaller row groups, or save the rows as JSON lines")
XLSX = Kind("the workbook", "save its rows as CSV or JSON lines", "post_training.worker.xlsx_source")


def read_in_process(arguments: Sequence[str], kind: Kind, descriptors: Sequence[int] = ()) -> Iterator[Row]:
    """Rows that the module of `kind` prints for `arguments`.

    Args:
        descriptors: open files that the process gets under their numbers.

    Raises:
        InvalidField, DataInvalid: as the process says.
        Unavailable: it took too long, or broke off.
    """
    with tempfile.TemporaryFile() as faults, _process(kind, arguments, faults, descriptors) as child:
        yield from parse_json_lines(_lines(child, kind))
        try:
            code = child.wait(READER_SECONDS)
        except subprocess.TimeoutExpired:
            raise _too_slow(kind) from None
        if code != 0:
            faults.seek(0)
            raise _fault(faults.read().decode(errors="replace"), kind)


@contextmanager
def _process(
    kind: Kind, arguments: Sequence[str], faults: IO[bytes], descriptors: Sequence[int]
) -> Iterator[subprocess.Popen[bytes]]:
    """The process that reads; it ends with the block, whose caller may have read enough, or with this process."""
    lifeline, kept = os.pipe()
    try:
        child = subprocess.Popen(
            [*tied_module(kind.module or READER_MODULE), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=faults,
            pass_fds=(lifeline, *descriptors),
            start_new_session=True,
            env={**torch_environment(), LIFELINE: str(lifeline)},
        )
        with child:
            try:
                yield child
            finally:
                if child.poll() is None:
                    with suppress(ProcessLookupError):
                        os.killpg(child.pid, signal.SIGKILL)
    finally:
        os.close(lifeline)
        os.close(kept)


def _lines(child: subprocess.Popen[bytes], kind: Kind) -> Iterator[bytes]:
    """Whole lines of the child's output. Raises Unavailable where they keep the reader waiting for too long."""
    assert child.stdout is not None  # it is a pipe
    left, parts, given = READER_SECONDS, [], 0
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while True:
            began = time.monotonic()
            if not selector.select(max(left, 0.0)):
                raise _too_slow(kind)
            left -= time.monotonic() - began
            chunk = os.read(child.stdout.fileno(), _CHUNK_BYTES)
            if not chunk:
                return  # a last line without its end is of a process that broke off, as its exit code says
            *lines, rest = chunk.split(b"\n")
            for line in lines:
                yield b"".join((*parts, line, b"\n"))
                parts, given = [], given + 1
                if given % _ROWS == 0:
                    left = READER_SECONDS
            parts.append(rest)


def _too_slow(kind: Kind) -> Unavailable:
    return Unavailable(f"{kind.name} took longer than {READER_SECONDS:g} s: {kind.too_slow}", param=_PARAM)


def _fault(output: str, kind: Kind) -> PostgradError:
    try:
        fault = json.loads(output.strip().splitlines()[-1])
        error = InvalidField if fault["code"] == InvalidField.code else DataInvalid
        return error(fault["message"], param=_PARAM)
    except (ValueError, LookupError, TypeError):
        return Unavailable(f"the process that reads {kind.name} broke off; is 'postgrad[torchtune]' installed?")
