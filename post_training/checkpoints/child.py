"""Work that needs torch, or takes long, done in a process of its own: its caller must not load it, or must survive it.

The child reads one JSON request from standard input and answers with one JSON line. It also holds one end of a pipe
that closes when the caller dies, and then ends itself, so nothing is left computing for nobody.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from apis.errors import DataInvalid, OutOfMemory, PostgradError, error_class
from post_training.processes import LIFELINE, die_with_caller, python_module, torch_environment

logger = logging.getLogger(__name__)
_LOGGED_CHARACTERS = 4000


def run_child(
    module: str,
    request: Mapping[str, Any],
    *,
    what: str,
    failure: type[PostgradError],
    timeout: float,
    threads: int | None = None,
    too_slow: type[PostgradError] | None = None,
) -> dict[str, Any]:
    """Run `python -m <module>` on `request` and return its answer. Nothing of it outlives the call.

    Args:
        what: names the work in messages, such as "the verification".
        failure: raised where the child ends without an answer, or not within `timeout` seconds.
        threads: CPU threads of the child; None leaves it to the machine.
        too_slow: raised instead of `failure` where the child takes longer than `timeout`.

    Raises:
        PostgradError: the child's own, with its class, message, field and row.
        OutOfMemory: the system killed the child.
    """
    reader, writer = os.pipe()
    try:
        process = _start(module, reader, threads)
        output, errors = _finish(process, json.dumps(request), what, too_slow or failure, timeout)
    finally:
        os.close(reader)
        os.close(writer)
    answer = json.loads(output) if process.returncode == 0 and output else {}
    if "error" in answer:
        raise _error(answer["error"], failure)
    if "result" not in answer:
        logger.error("%s ended with code %d: %s", what, process.returncode, errors[-_LOGGED_CHARACTERS:])
        raise _silence(process.returncode, what, failure)
    return answer["result"]


def serve_child(handler: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The child's side: one request through `handler`. What libraries print goes to standard error."""
    die_with_caller()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json.loads(sys.stdin.read())
    try:
        answer = {"result": handler(request)}
    except PostgradError as error:
        answer = {"error": _plain(error)}
        traceback.print_exc()
    with answers:
        json.dump(answer, answers)


def _plain(error: PostgradError) -> dict[str, Any]:
    fields = {"code": error.code, "message": error.message, "param": error.param}
    return fields | ({"row": error.row, "pointer": error.pointer} if isinstance(error, DataInvalid) else {})


def _error(fields: Mapping[str, Any], failure: type[PostgradError]) -> PostgradError:
    error = (error_class(fields["code"]) or failure)(fields["message"], param=fields.get("param"))
    if isinstance(error, DataInvalid):
        # The message names the row already; the constructor would name it twice.
        error.row, error.pointer = fields.get("row"), fields.get("pointer")
    return error


def _start(module: str, lifeline: int, threads: int | None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        python_module(module),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(lifeline,),
        start_new_session=True,
        text=True,
        env={**torch_environment(threads), LIFELINE: str(lifeline)},
    )


def _finish(
    process: subprocess.Popen[str], request: str, what: str, too_slow: type[PostgradError], timeout: float
) -> tuple[str, str]:
    try:
        return process.communicate(request, timeout)
    except subprocess.TimeoutExpired:
        raise too_slow(f"{what} took longer than {timeout:g} s and was stopped") from None
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _silence(code: int, what: str, failure: type[PostgradError]) -> PostgradError:
    if code == -signal.SIGKILL:
        return OutOfMemory(f"{what} was killed by the system, most likely for lack of memory: use a smaller model")
    return failure(f"{what} ended with code {code} and no answer; the log of the process that asked for it says why")
