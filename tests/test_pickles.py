"""Pickles can run code, so none is loaded, wherever a file comes in."""

from __future__ import annotations

import ast
import base64
import json
import pickle
import pickletools
from collections.abc import Iterator
from pathlib import Path

import pytest

from apis.datasets.models import URIDataSource
from apis.errors import DataInvalid, InvalidField, ModelInvalid
from post_training.catalog.folders import imported_folder
from post_training.catalog.importing import import_model
from post_training.catalog.model_files import PICKLE_SUFFIXES
from post_training.data.sources import SourcePolicy, open_rows
from tests.test_model_catalog import model_folder

REPOSITORY = Path(__file__).resolve().parents[1]
SUFFIXES = sorted(PICKLE_SUFFIXES)


class Payload:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


@pytest.fixture
def payload(tmp_path: Path) -> Iterator[bytes]:
    """A pickle that must not be loaded by the test that gets it."""
    mark = tmp_path / "loaded"
    content = pickle.dumps(Payload(mark))
    assert any(op.name == "REDUCE" for op, _, _ in pickletools.genops(content))
    yield content
    assert not mark.exists()
    pickle.loads(content)
    assert mark.exists(), "the payload does nothing, so the test shows nothing"


def test_pickled_weights_are_refused_by_name_whatever_they_are_called(tmp_path: Path, payload: bytes):
    for suffix in SUFFIXES:
        folder = model_folder(tmp_path / f"model{suffix}")
        (folder / "model.safetensors").unlink()
        (folder / f"pytorch_model{suffix}").write_bytes(payload)
        with pytest.raises(ModelInvalid, match=rf"as pickle \(pytorch_model{suffix}\), which can run code"):
            import_model(str(folder), "m", tmp_path / "home")


def test_a_pickle_under_the_name_of_a_safetensors_file_is_none(tmp_path: Path, payload: bytes):
    folder = model_folder(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(payload)
    with pytest.raises(ModelInvalid, match="is no safetensors file"):
        import_model(str(folder), "m", tmp_path / "home")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(payload)
    index = {"weight_map": {"a": "pytorch_model.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelInvalid, match=r"names 'pytorch_model\.bin', which is no safetensors file"):
        import_model(str(folder), "m", tmp_path / "home")


def test_pickles_beside_safetensors_stay_where_they_are(tmp_path: Path, payload: bytes):
    folder = model_folder(tmp_path / "model")
    for suffix in SUFFIXES:
        (folder / f"more{suffix}").write_bytes(payload)
    import_model(str(folder), "m", tmp_path / "home")
    taken = imported_folder(tmp_path / "home", "m")
    assert (taken / "model.safetensors").exists()
    assert not [file for file in taken.iterdir() if payload in file.read_bytes()]


def test_a_pickle_is_no_file_of_rows_whatever_it_is_called(tmp_path: Path, payload: bytes):
    policy = SourcePolicy(allowed_roots=[str(tmp_path)])
    for suffix in SUFFIXES:
        (tmp_path / f"rows{suffix}").write_bytes(payload)
        with pytest.raises(InvalidField, match="data files end in"):
            open_rows(URIDataSource(uri=f"rows{suffix}"), policy)
    for suffix in (".jsonl", ".json", ".csv", ".parquet"):
        (tmp_path / f"rows{suffix}").write_bytes(payload)
        with pytest.raises(DataInvalid):
            list(open_rows(URIDataSource(uri=f"rows{suffix}"), policy))


def test_a_pickle_in_a_data_uri_is_refused(payload: bytes):
    encoded = base64.b64encode(payload).decode()
    with pytest.raises(InvalidField, match="is not read"):
        open_rows(URIDataSource(uri=f"data:application/x-pickle;base64,{encoded}"), SourcePolicy())
    for kind in ("application/octet-stream", "None", "application/json", "text/csv"):
        with pytest.raises(DataInvalid):
            list(open_rows(URIDataSource(uri=f"data:{kind};base64,{encoded}"), SourcePolicy()))


# Modules that load pickles or other code.
_LOADERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


def test_no_code_of_ours_loads_a_pickle_or_a_models_own_code():
    parts = ("apis", "post_training", "providers", "distributions")
    files = [file for part in parts for file in (REPOSITORY / part).rglob("*.py")]
    assert len(files) > 100
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            assert not _faults(node), f"{file.name}: {ast.unparse(node)}"


def _faults(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [name.name for name in node.names if name.name in _LOADERS]
    if isinstance(node, ast.ImportFrom):
        return [node.module] if node.module in _LOADERS else []
    if not isinstance(node, ast.Call):
        return []
    called = ast.unparse(node.func)
    allowed = [
        keyword.arg
        for keyword in node.keywords
        if keyword.arg in ("allow_pickle", "trust_remote_code") and ast.unparse(keyword.value) != "False"
    ]
    return [called] if called in ("torch.load", "torch.jit.load", "pandas.read_pickle") else [str(a) for a in allowed]
