"""The process where inference runs: `python -m providers.inference.worker <config as JSON>`.

Speaks the lines of wire.py on stdin and stdout. Requests are answered one after another, in the order they came. It
ends at once when its stdin does, so it never outlives the server, however that one ends.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import IO, Any, Protocol

from apis.errors import PostgradError
from providers.inference.config import TransformersInferenceConfig
from providers.inference.wire import Done, GenerateRequest, WireError

_log = logging.getLogger("postgrad.inference.worker")


class Generates(Protocol):
    """What the worker needs of the engine."""

    def generate(self, request: GenerateRequest, cancelled: Callable[[], bool]) -> Iterator[str | Done]: ...


class Inbox:
    """Requests in the order they came, filled by a thread so that a cancel is seen while a generation runs."""

    def __init__(self, lines: IO[bytes]) -> None:
        self._lines = lines
        self._requests: SimpleQueue[tuple[int, dict[str, Any]]] = SimpleQueue()
        self._cancelled: dict[int, threading.Event] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        code = 1
        try:
            for line in self._lines:
                self._take(json.loads(line))
            code = 0
        except Exception:
            _log.exception("the server wrote something unreadable; this worker ends")
        finally:
            # Not sys.exit: the main thread may be deep in a forward pass, and nobody is left to read its result.
            os._exit(code)

    def _take(self, message: dict[str, Any]) -> None:
        number = message["id"]
        if "generate" in message:
            self._cancelled[number] = threading.Event()
            self._requests.put((number, message["generate"]))
        elif (event := self._cancelled.get(number)) is not None:
            event.set()

    def next(self) -> tuple[int, dict[str, Any]]:
        """Wait for the next request: its number and body."""
        return self._requests.get()

    def cancelled(self, number: int) -> bool:
        return self._cancelled[number].is_set()

    def finish(self, number: int) -> None:
        del self._cancelled[number]


def take_stdout() -> IO[bytes]:
    """The channel to the server. Whatever else this process prints goes to stderr from here on."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return channel


def send(channel: IO[bytes], message: dict[str, Any]) -> None:
    channel.write(json.dumps(message).encode() + b"\n")
    channel.flush()


def answer(engine: Generates, inbox: Inbox, number: int, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The messages that answer one request; none once it is cancelled."""
    try:
        request = GenerateRequest.model_validate(body)
        for event in engine.generate(request, lambda: inbox.cancelled(number)):
            yield {"text": event} if isinstance(event, str) else {"done": event.model_dump()}
    except PostgradError as error:
        yield {"error": WireError.of(error).model_dump()}
    except Exception as error:
        _log.exception("request %d failed", number)
        problem = PostgradError(f"the model failed ({type(error).__name__}); the server's log says why")
        yield {"error": WireError.of(problem).model_dump()}
    finally:
        inbox.finish(number)


def main() -> int:
    """Serve until stdin ends."""
    channel = take_stdout()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    config = TransformersInferenceConfig.model_validate_json(sys.argv[1])
    inbox = Inbox(sys.stdin.buffer)
    try:
        from providers.inference.engine import Engine  # so late, because stdin is to be watched meanwhile

        engine = Engine(config)
    except ImportError as error:
        send(channel, {"fatal": f"inference needs {error.name}: pip install 'postgrad[torchtune]', then send it again"})
        return 1
    except PostgradError as error:
        send(channel, {"fatal": error.message})
        return 1
    while True:
        number, body = inbox.next()
        for message in answer(engine, inbox, number, body):
            send(channel, {"id": number} | message)


if __name__ == "__main__":
    sys.exit(main())
