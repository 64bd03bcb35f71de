"""How a process that reads rows answers `post_training.data.reader_process`: rows on stdout, a fault on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

from apis.datasets.models import Row
from apis.errors import PostgradError
from post_training.data.records import encode_row

ERROR_EXIT_CODE = 2


def print_rows(rows: Iterable[Row]) -> int:
    """Print rows as JSON lines, or the error that reading them raises as an object; gives the exit code."""
    try:
        for number, row in enumerate(rows):
            sys.stdout.buffer.write(encode_row(row, number))
        sys.stdout.buffer.flush()
    except PostgradError as error:
        print(json.dumps({"code": error.code, "message": error.message}), file=sys.stderr)
        return ERROR_EXIT_CODE
    return 0
