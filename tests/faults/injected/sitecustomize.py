"""Loaded by every Python process of a stack under test, by way of PYTHONPATH: dies at a chosen instant.

POSTGRAD_TEST_DIE = "<before|after>:<n>:<marker file>": the worker kills its server and itself right before or right
after its n-th rename of a checkpoint into place. The marker, made then, keeps later attempts alive.
"""

import os
import signal
import sys

_PLAN = os.environ.get("POSTGRAD_TEST_DIE")


def _die(marker: str) -> None:
    os.close(os.open(marker, os.O_CREAT | os.O_WRONLY))
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _install(plan: str) -> None:
    when, number, marker = plan.split(":", 2)
    if os.path.exists(marker):
        return
    renames = 0

    def watch(event: str, arguments: tuple) -> None:
        nonlocal renames
        if event == "os.rename" and os.path.basename(os.path.dirname(str(arguments[1]))) == "checkpoints":
            renames += 1
            if renames == int(number) and when == "before":
                _die(marker)
        elif renames == int(number) and when == "after" and event == "open":
            # The first thing after the rename is to open the folder for its fsync. Opening the marker is an event, too.
            renames += 1
            _die(marker)

    sys.addaudithook(watch)


if _PLAN and "post_training.worker.main" in sys.orig_argv:
    _install(_PLAN)
