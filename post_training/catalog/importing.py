"""Bringing a model into the home folder: checked first, then in place all at once. No torch.

python -m post_training.catalog.importing < request.json     (the download from the hub, in a process of its own)
"""

from __future__ import annotations

import errno
import json
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
from post_training.catalog.models import ModelCatalog
from post_training.checkpoints.child import run_child, serve_child
from post_training.checkpoints.layout import PICKLE_SUFFIXES, disk_full, fsync, fsync_tree
from post_training.jobs.database import Database

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_TAKEN_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model", ".md"})
_TAKEN_PREFIXES = ("LICENSE", "NOTICE", "USE_POLICY")
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors format itself
_DOWNLOAD_SECONDS = 24 * 3600
_CHUNK_BYTES = 1 << 20


def import_model(
    source: str, model_id: str | None, home: Path, database: Database | None = None, allow_hub: bool = False
) -> str:
    """Make a Hugging Face model directory (or, if allowed, a hub repository) a model of this home folder.

    Weights are hard-linked where that is possible, everything else is copied. The same content again is a no-op.

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
        if not target.exists():
            _place(directory, files, target, identifier)
    except OSError as error:
        if full := disk_full(error, f"model {identifier!r}"):
            raise full from error
        raise
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
    if list(directory.glob("consolidated*.pth")) and not (directory / "config.json").is_file():
        raise ModelInvalid(
            f"{directory.name} is a model in Meta's format (consolidated.*.pth): convert it to Hugging Face format, "
            "for Llama with `python -m transformers.models.llama.convert_llama_weights_to_hf`, and import the result"
        )
    if (directory / "adapter_config.json").exists():
        raise ModelInvalid(
            f"{directory.name} holds an adapter (adapter_config.json), alone or beside a model: import the base model "
            "by itself"
        )
    config = _read_json(directory, "config.json", "point at the folder that holds it")
    if not config.get("model_type"):
        raise ModelInvalid(f"{directory.name}/config.json names no model_type: it is no Hugging Face model")
    _read_json(directory, "tokenizer.json", "save the model's fast tokenizer beside it with `save_pretrained`")
    weights = _check_weights(directory)
    return sorted({*weights, *(path.name for path in directory.iterdir() if _is_taken(path))})


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
            f"there is no folder {source!r}, and this stack may not fetch models from the hub: download {hub} yourself "
            "and import its folder, or allow the hub in the stack's configuration"
        )
    answer = run_child(
        "post_training.catalog.importing",
        {"repository": hub},
        what=f"the download of {hub}",
        failure=Unavailable,
        timeout=_DOWNLOAD_SECONDS,
    )
    return Path(answer["directory"]), hub


def _check_weights(directory: Path) -> list[str]:
    """Names of the weight files, index included, after checking each against its header."""
    if not (directory / _INDEX).is_file():
        if not (directory / _SINGLE).is_file():
            raise _no_weights(directory)
        read_header(directory / _SINGLE)
        return [_SINGLE]
    weight_map = _read_json(directory, _INDEX, "download the model again").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelInvalid(f"{directory.name}/{_INDEX} has no weight_map: download the model again")
    held = {file: read_header(_inside(directory, file)).keys() for file in sorted(set(weight_map.values()))}
    for tensor, file in weight_map.items():
        if tensor not in held[file]:
            raise ModelInvalid(
                f"{directory.name}/{file} lacks {tensor}, which {_INDEX} says it holds: download it again"
            )
    return [_INDEX, *held]


def read_header(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file by name (dtype, shape, data_offsets), without its data.

    The format: 8 bytes, little-endian length n; n bytes of JSON; the data (huggingface/safetensors, README).

    Raises:
        ModelInvalid: the file is missing, damaged or cut short.
    """
    where = f"{path.parent.name}/{path.name}"
    if not path.is_file():
        raise ModelInvalid(f"{where} is missing: the download is not complete")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, _MAX_HEADER_BYTES):
            raise ModelInvalid(f"{where} is no safetensors file, or was cut short: download it again")
        header = file.read(length)
    try:
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    except (ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise ModelInvalid(f"{where} has a damaged header: download it again") from error
    if 8 + length + end != size:
        raise ModelInvalid(f"{where} has {size} bytes, its header asks for {8 + length + end}: download it again")
    return tensors


def _no_weights(directory: Path) -> ModelInvalid:
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        return ModelInvalid(
            f"{directory.name} has its weights as pickle ({pickles[0]}), which can run code and is never loaded: save "
            "it again from transformers with `save_pretrained`, which writes safetensors"
        )
    return ModelInvalid(f"{directory.name} has neither {_SINGLE} nor {_INDEX}: the download is not complete")


def _inside(directory: Path, file: object) -> Path:
    if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
        raise ModelInvalid(f"{directory.name}/{_INDEX} names {file!r}, which is no safetensors file beside it")
    return directory / file


def _is_taken(path: Path) -> bool:
    wanted = path.suffix in _TAKEN_SUFFIXES or path.name.startswith(_TAKEN_PREFIXES)
    return wanted and path.is_file() and path.name != RECORD and not path.name.endswith(".index.json")


def _read_json(directory: Path, name: str, remedy: str) -> dict[str, Any]:
    try:
        content = json.loads((directory / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelInvalid(f"{directory.name} has no {name}: {remedy}") from None
    except ValueError as error:
        raise ModelInvalid(f"{directory.name}/{name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelInvalid(f"{directory.name}/{name} is not a JSON object: {remedy}")
    return content


def _place(directory: Path, files: list[str], target: Path, identifier: str) -> None:
    """Copy into a temporary sibling, then rename; a concurrent import of the same id may win."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        temporary.mkdir()
        for name in files:
            _take(directory / name, temporary / name)
        write_record(temporary, identifier)
        fsync_tree(temporary)
        temporary.rename(target)
        fsync(target.parent)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _take(source: Path, target: Path) -> None:
    if source.suffix == ".safetensors":
        try:
            os.link(source.resolve(), target)
            return
        except OSError:
            pass  # another file system, or one without links
    shutil.copyfile(source, target)


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
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

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
    return {"directory": directory}


if __name__ == "__main__":
    serve_child(_download)
