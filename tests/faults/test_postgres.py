"""A stack on PostgreSQL whose database server is killed and comes back while jobs are submitted and run."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import httpx
import pytest

from apis.post_training.models import JobStatus
from post_training.client import StackClient
from post_training.jobs.database import Database
from post_training.jobs.store import JobStore
from tests.faults.harness import make_home, register_rows, repeated, request, until, wait
from tests.postgres import Cluster
from tests.served_stack import run_yaml_with, served

pytestmark = pytest.mark.timeout(900)
SUBMIT = "/v1alpha/post-training/supervised-fine-tune"


def test_a_database_server_that_is_restarted_under_load_loses_and_doubles_no_job(
    tmp_path: Path, tiny: Path, postgres_cluster: Cluster
):
    home = make_home(tmp_path, tiny)
    url_of_store = postgres_cluster.create_database()
    jobs = {"max_queued": 10000, "devices": ["cpu"]}
    run_yaml = run_yaml_with(tmp_path, metadata_store=url_of_store, jobs=jobs)
    accepted: list[str] = []
    refused: list[httpx.Response] = []
    broken: list[str] = []
    stop = threading.Event()

    def submit_on_and_on(url: str, thread: int) -> None:
        number = 0
        with httpx.Client(base_url=url, timeout=60) as http:
            while not stop.is_set():
                name = f"load-{thread}-{number}"
                body = request(name, n_epochs=1)
                try:
                    answer = http.post(SUBMIT, json=body)
                except httpx.HTTPError as error:
                    broken.append(repr(error))
                    continue
                if answer.status_code == 200:
                    accepted.append(name)
                    number += 1
                else:
                    refused.append(answer)  # sent again under the same id
                time.sleep(0.05)

    with served(home, stack=run_yaml) as (url, _), StackClient(url) as client:
        register_rows(client, 400)
        client.post_training.supervised_fine_tune(**request("trained", n_epochs=3))
        until(lambda: (p := client.post_training.status("trained").progress) and p.step > 5)
        threads = [threading.Thread(target=submit_on_and_on, args=(url, number)) for number in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(repeated(2, 6)):
            time.sleep(1.5)
            postgres_cluster.restart(immediate=True)
        time.sleep(1.5)
        stop.set()
        for thread in threads:
            thread.join()
        assert not broken, "every request had an answer"
        assert {answer.status_code for answer in refused} <= {503}
        assert all(answer.json()["error"]["code"] == "store_unavailable" for answer in refused)
        assert all("retry-after" in answer.headers for answer in refused)
        assert all(url_of_store not in answer.text for answer in refused)
        for name in accepted:
            client.post_training.cancel(name)
        assert wait(client, "trained").status is JobStatus.completed
        assert client.post_training.status("trained").attempt == 1
    store = JobStore(Database(url_of_store))
    stored = [job.job_uuid for job in store.summaries()]
    assert len(stored) == len(set(stored))
    assert set(accepted) <= set(stored)
    # What was stored though its answer was lost was sent again, and accepted as the same job.
    assert len(set(stored) - set(accepted) - {"trained"}) <= len(threads)
    assert len(accepted) > 10
    moves = [move.new for move in store.transitions("trained")]
    assert moves == ["scheduled", "in_progress", "completed"]
    store.database.close()
