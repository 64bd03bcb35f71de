"""A stored file as an answer: whole, by ranges, or not at all where the reader has it."""

from __future__ import annotations

import base64
import re

from fastapi import Request, Response
from fastapi.responses import FileResponse

from apis.post_training.models import StoredFile

_UNIT = re.compile(r"\s*bytes\s*=", re.IGNORECASE)
_RANGE = re.compile(r"([0-9]{0,18})-([0-9]{0,18})")


def file_answer(request: Request, stored: StoredFile) -> Response:
    """The file, with its hash as ETag and, for any reader, as Repr-Digest (RFC 9530).

    Range, If-Range and If-None-Match are honoured (RFC 9110); a Range that is not well-formed counts as none.
    """
    etag = f'"{stored.sha256}"'
    headers = {"etag": etag, "cache-control": "no-cache", "x-content-type-options": "nosniff"}
    if _is_known(request.headers.get("if-none-match"), etag):
        return Response(status_code=304, headers=headers)
    if not _is_well_formed(request.headers.get("range")):
        request.scope["headers"] = [(name, value) for name, value in request.scope["headers"] if name != b"range"]
    digest = base64.b64encode(bytes.fromhex(stored.sha256)).decode()
    headers["repr-digest"] = f"sha-256=:{digest}:"
    return FileResponse(stored.path, headers=headers, filename=stored.path.name, stat_result=stored.path.stat())


def _is_known(header: str | None, etag: str) -> bool:
    return header is not None and not {"*", etag}.isdisjoint(
        tag.strip().removeprefix("W/") for tag in header.split(",")
    )


def _is_well_formed(header: str | None) -> bool:
    if header is None or not (unit := _UNIT.match(header)):
        return False
    return all(_is_range(part.strip()) for part in header[unit.end() :].split(","))


def _is_range(text: str) -> bool:
    match = _RANGE.fullmatch(text)
    if match is None:
        return False
    first, last = match.groups()
    if not first:
        return bool(last)
    return not last or int(first) <= int(last)
