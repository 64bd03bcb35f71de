"""A Parquet file under an allowed root: registered, listed and trained on, its columns mapped, like any other file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow
import pyarrow.parquet
import pytest

from apis.errors import BadRequest, DataInvalid
from apis.post_training.models import JobStatus
from post_training.catalog.importing import import_model
from post_training.client import StackClient
from tests.served_stack import served
from tests.tiny_llama import save_tiny_llama

LONG = "word " * 400


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stack")
    home = folder / "home"
    import_model(str(save_tiny_llama(folder / "tiny", context=256)), "tiny", home)
    rows = [{"question": LONG if n == 2 else f"Say {n}", "answer": f"The hen {n}."} for n in range(9)]
    (home / "data").mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), home / "data" / "sums.parquet")
    return home


@pytest.fixture(scope="module")
def url(home: Path) -> Iterator[str]:
    with served(home) as (url, _):
        yield url


def submitted(client: StackClient, job: str, **data: Any) -> None:
    config = {"dataset_id": "sums", "batch_size": 4, "max_seq_len": 64, **data}
    client.post_training.supervised_fine_tune(
        job_uuid=job,
        model="tiny",
        training_config={"n_epochs": 1, "dtype": "fp32", "data_config": config},
        algorithm_config={"type": "LoRA", "rank": 4, "alpha": 8},
    )


def test_a_parquet_file_is_registered_listed_and_trained_on(url: str):
    with StackClient(url) as client:
        client.datasets.register({"type": "uri", "uri": "sums.parquet"}, dataset_id="sums")
        page = httpx.get(f"{url}/v1beta/datasetio/iterrows/sums", params={"start_index": 1, "limit": 2}).json()
        assert page["data"] == [
            {"question": "Say 1", "answer": "The hen 1."},
            {"question": LONG, "answer": "The hen 2."},
        ]
        with pytest.raises(DataInvalid, match="fit no data format"):
            submitted(client, "unmapped")
        with pytest.raises(DataInvalid, match="row 0, /solution"):
            submitted(
                client,
                "missing",
                data_format="prompt_completion",
                columns={"prompt": "question", "completion": "solution"},
            )
        with pytest.raises(BadRequest, match="columns"):
            submitted(client, "unknown", data_format="alpaca", columns={"prompt": "question"})
        mapping = {"prompt": "question", "completion": "answer"}
        submitted(client, "drops", columns=mapping, on_overlength="drop")
        submitted(client, "fails", columns=mapping, on_overlength="error")
        done = client.post_training.wait("drops", poll_seconds=0.2, timeout=120)
        assert done.status is JobStatus.completed, done.error
        assert done.report is not None
        report = done.report["dataset"]
        assert (report["rows"], report["format"]) == (9, "prompt_completion")
        assert report["dropped"]["overlength"] == {"count": 1, "first_rows": [2]}
        failed = client.post_training.wait("fails", poll_seconds=0.2, timeout=120)
        assert failed.status is JobStatus.failed
        assert failed.error is not None
        assert failed.error.code == "data_invalid"
        assert "row 2: has" in failed.error.message
