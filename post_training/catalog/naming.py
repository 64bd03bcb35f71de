"""Ids as folder names."""

from __future__ import annotations

import hashlib
from urllib.parse import quote

from apis.common import check_identifier

MAX_FOLDER_NAME = 100
_HASH_LENGTH = 16


def folder_name(identifier: str) -> str:
    """The one folder name that stands for `identifier`, and for no other id.

    Percent-encoded. Where that is over 100 characters or not lower case, `+` and a hash of the id follow, so that two
    ids never share a folder, not even where the file system ignores case. No encoded id holds a `+` of its own.

    Raises:
        InvalidField: the id is malformed.
    """
    encoded = quote(check_identifier(identifier), safe="")
    if len(encoded) <= MAX_FOLDER_NAME and identifier == identifier.lower():
        return encoded
    digest = hashlib.sha256(identifier.encode()).hexdigest()[:_HASH_LENGTH]
    return f"{encoded[: MAX_FOLDER_NAME - _HASH_LENGTH - 1]}+{digest}"
