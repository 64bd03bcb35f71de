"""Imported models on disk: `<home>/models/<folder>/`, each with a record that says which id it was imported as.

The record makes an import visible to every store that uses the home folder, whichever process did it.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from apis.common import check_identifier
from apis.errors import InvalidField
from post_training.catalog.naming import folder_name

logger = logging.getLogger(__name__)

RECORD = "postgrad-model.json"


def models_root(home: Path) -> Path:
    return home / "models"


def imported_folder(home: Path, identifier: str) -> Path:
    """Where the model `identifier` is imported to."""
    return models_root(home) / folder_name(identifier)


def write_record(directory: Path, identifier: str) -> None:
    (directory / RECORD).write_text(json.dumps({"model_id": identifier}) + "\n", encoding="utf-8")


def imported_models(home: Path) -> dict[str, Path]:
    """Directories of the imported models, by id. One whose record cannot be read is left out, and the log says so."""
    found = {}
    for record in sorted(models_root(home).glob(f"*/{RECORD}")):
        # pathlib's * takes hidden folders too; an import under way is one.
        if record.parent.name.startswith("."):
            continue
        if (identifier := _recorded_id(record)) is not None:
            found[identifier] = record.parent
    return found


def _recorded_id(record: Path) -> str | None:
    try:
        return check_identifier(json.loads(record.read_text(encoding="utf-8"))["model_id"])
    except (OSError, ValueError, LookupError, TypeError, InvalidField) as error:
        logger.warning("%s cannot be read (%s): import the model again", record, error)
        return None


def forget_imported(home: Path, identifier: str) -> None:
    """Make the import invisible; the model's own files stay."""
    (imported_folder(home, identifier) / RECORD).unlink(missing_ok=True)
