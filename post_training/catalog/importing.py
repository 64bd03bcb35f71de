"""Bringing a model into the home folder: checked first, then in place all at once. No torch.

python -m post_training.catalog.importing < request.json     (the download from the hub, in a process of its own)
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from apis.common import check_identifier
from apis.errors import Conflict, ModelInvalid, ModelNotFound, Unavailable
from post_training.catalog.aliases import hub_id
from post_training.catalog.folders import RECORD, imported_folder, write_record
from post_training.catalog.model_files import (
    CONFIG_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    read_json,
    tensor_headers,
    weight_files,
)
from post_training.catalog.models import ModelCatalog
from post_training.checkpoints.child import run_child, serve_child
from post_training.checkpoints.layout import disk_full, fsync, fsync_tree
from post_training.jobs.database import Database

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_TAKEN_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model", ".md"})
_TAKEN_PREFIXES = ("LICENSE", "NOTICE", "USE_POLICY")
_DOWNLOAD_SECONDS = 24 * 3600
_CHUNK_BYTES = 1 << 20


def import_model(
    source: str, model_id: str | None, home: Path, database: Database | None = None, allow_hub: bool = False
) -> str:
    """Make a Hugging Face model directory (or, if allowed, a hub repository) a model of this home folder.

    Its files are copied, so that nothing done to the source later changes the model. The same content again is a no-op.

    Args:
        source: path of a directory, or a hub id or SKU name.
        model_id: the id to give it; None: the directory's name, or the hub id.
        database: where to record it at once; without, the catalog finds it on its own.

    Returns:
        the model id.

    Raises:
        ModelNotFound: there is no such directory, or it looks like a hub id and the hub is not allowed.
        ModelInvalid: the directory is no complete Hugging Face model; the message says what to do.
        Conflict: the id is another model's.
        InvalidField: the id is not well-formed.
        DiskFull: there is no room.
    """
    directory, natural_id = _locate(source, allow_hub)
    identifier = check_identifier(model_id or natural_id, param="model_id")
    files = check_model(directory)
    target = imported_folder(home, identifier)
    try:
        placed = not target.exists() and _place(directory, files, target, identifier)
    except OSError as error:
        if full := disk_full(error, f"model {identifier!r}"):
            raise full from error
        raise
    if not placed:
        _check_same(directory, files, target, identifier)
    if database is not None:
        with database.session() as session:
            ModelCatalog(database, home).add_base(session, identifier, target, {})
    return identifier


def check_model(directory: Path) -> list[str]:
    """Check that `directory` is a complete Hugging Face model and say which files belong to it.

    Raises:
        ModelInvalid: naming the file, and what to do.
    """
    if (directory / "adapter_config.json").exists():
        raise ModelInvalid(
            f"{directory.name} holds an adapter (adapter_config.json), alone or beside a model: import the base model "
            "by itself"
        )
    weights = weight_files(directory)
    config = read_json(directory / CONFIG_FILE, "point at the folder that holds it")
    if not config.get("model_type"):
        raise ModelInvalid(f"{directory.name}/{CONFIG_FILE} names no model_type: it is no Hugging Face model")
    read_json(directory / "tokenizer.json", "save the model's fast tokenizer beside it with `save_pretrained`")
    tensor_headers(directory)
    index = [] if weights == [directory / SINGLE_FILE] else [INDEX_FILE]
    others = (path.name for path in directory.iterdir() if _is_taken(path))
    return sorted({*index, *(path.name for path in weights), *others})


def _locate(source: str, allow_hub: bool) -> tuple[Path, str]:
    """The directory to read, and the id it has where none is given."""
    directory = Path(source).expanduser()
    if directory.is_dir():
        return directory, directory.resolve().name
    hub = hub_id(source)
    if not _HUB_ID.fullmatch(hub):
        raise ModelNotFound(f"there is no folder {source!r}, and it is no hub id (owner/name) either")
    if not allow_hub:
        raise ModelNotFound(
            f"there is no folder {source!r}, and models are not fetched from the hub unasked: download {hub} yourself "
            "and import its folder, or pass --allow-hub"
        )
    answer = run_child(
        "post_training.catalog.importing",
        {"repository": hub},
        what=f"the download of {hub}",
        failure=Unavailable,
        timeout=_DOWNLOAD_SECONDS,
    )
    return Path(answer["directory"]), hub


def _is_taken(path: Path) -> bool:
    wanted = path.suffix in _TAKEN_SUFFIXES or path.name.startswith(_TAKEN_PREFIXES)
    return wanted and path.is_file() and path.name != RECORD and not path.name.endswith(".index.json")


def _place(directory: Path, files: list[str], target: Path, identifier: str) -> bool:
    """Copy into a temporary sibling, then rename; false where a concurrent import of the same id won."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        temporary.mkdir()
        for name in files:
            # Not a hard link: whoever saves the model again in place would change the import with it.
            shutil.copyfile(directory / name, temporary / name)
        write_record(temporary, identifier)
        fsync_tree(temporary)
        temporary.rename(target)
        fsync(target.parent)
        return True
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_same(directory: Path, files: list[str], target: Path, identifier: str) -> None:
    """Raises Conflict unless `target` holds exactly these files; makes a forgotten import visible again."""
    held = sorted(path.name for path in target.iterdir() if path.name != RECORD)
    if held != files or not all(_same_content(directory / name, target / name) for name in files):
        raise Conflict(
            f"model {identifier!r} was imported before with other content: choose another id", param="model_id"
        )
    if not (target / RECORD).exists():
        write_record(target, identifier)


def _same_content(left: Path, right: Path) -> bool:
    if left.samefile(right):
        return True
    if left.stat().st_size != right.stat().st_size:
        return False
    with left.open("rb") as one, right.open("rb") as other:
        return all(a == b for a, b in zip(_chunks(one), _chunks(other), strict=True))


def _chunks(file: Any) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk


def _download(request: dict[str, Any]) -> dict[str, Any]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    repository = request["repository"]
    patterns = [f"*{suffix}" for suffix in (".safetensors", *sorted(_TAKEN_SUFFIXES))] + [
        f"{prefix}*" for prefix in _TAKEN_PREFIXES
    ]
    try:
        directory = snapshot_download(repository, allow_patterns=patterns, ignore_patterns=["*/*"])
    except GatedRepoError as error:
        raise ModelNotFound(f"{repository} is gated: ask for access at the hub, then set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(f"the hub has no {repository}, or it is private: set HF_TOKEN") from error
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise Unavailable(f"{repository} could not be fetched: the hub cannot be reached from here") from error
    return {"directory": directory}


if __name__ == "__main__":
    serve_child(_download)
