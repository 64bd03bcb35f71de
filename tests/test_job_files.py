"""The files of a job: handed out exactly as their manifest has them, deleted whole or not at all."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import event as database_event
from sqlalchemy.exc import OperationalError

from apis.errors import JobNotFound
from apis.models import RegisterModelRequest
from apis.post_training.models import JobStatus
from post_training.catalog.naming import folder_name
from post_training.job_files import finish_deletions
from tests.job_server import ADAPTER, JOBS, JobServer, job_server

WEIGHTS = "adapter/adapter_model.safetensors"
CONTENT = ADAPTER[WEIGHTS]
PATH = f"{JOBS}/j/checkpoints/4/files/{WEIGHTS}"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[JobServer]:
    with job_server(tmp_path / "home") as made:
        yield made


@pytest.fixture
def api(server: JobServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url + JOBS, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server that no test changes, with a checkpoint of step 4 of job `j`."""
    with job_server(tmp_path_factory.mktemp("shared") / "home") as made, httpx.Client(base_url=made.url) as client:
        ended_job(made)
        yield client


def ended_job(server: JobServer, job_uuid: str = "j", steps: tuple[int, ...] = (4,)) -> Path:
    """A completed job with a checkpoint at each of `steps`; gives its folder."""
    owner = server.claim(job_uuid)
    directory = [server.checkpoint(job_uuid, owner, step) for step in steps][-1]
    server.finish(job_uuid, owner)
    return directory.parent.parent


def error_of(answer: httpx.Response) -> dict[str, Any]:
    return answer.json()["error"]


# -- handed out ------------------------------------------------------------------------------------------------------


def test_the_list_has_every_file_with_its_size_and_hash(shared: httpx.Client):
    answer = shared.get(f"{JOBS}/j/checkpoints/4/files").json()
    assert (answer["job_uuid"], answer["step"]) == ("j", 4)
    assert answer["data"] == [
        {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in sorted(ADAPTER.items())
    ]


def test_a_file_comes_with_its_hash_as_etag_and_digest(shared: httpx.Client):
    digest = hashlib.sha256(CONTENT)
    got = shared.get(PATH)
    assert (got.status_code, got.content) == (200, CONTENT)
    assert got.headers["etag"] == f'"{digest.hexdigest()}"'
    assert got.headers["repr-digest"] == f"sha-256=:{base64.b64encode(digest.digest()).decode()}:"
    head = shared.head(PATH)
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(len(CONTENT)))
    assert (head.headers["etag"], head.headers["accept-ranges"]) == (got.headers["etag"], "bytes")


@pytest.mark.parametrize(
    ("asked", "start", "end"), [("0-0", 0, 1), ("100-299", 100, 300), ("179000-", 179000, 179200), ("-5", -5, None)]
)
def test_a_range_is_that_part_of_the_file(shared: httpx.Client, asked: str, start: int, end: int | None):
    got = shared.get(PATH, headers={"Range": f"bytes={asked}"})
    assert (got.status_code, got.content) == (206, CONTENT[start:end])
    first = start % len(CONTENT)
    assert got.headers["content-range"] == f"bytes {first}-{first + len(got.content) - 1}/{len(CONTENT)}"
    # The digest is the whole file's, whatever part is sent.
    assert got.headers["repr-digest"] == shared.head(PATH).headers["repr-digest"]


def test_several_ranges_come_in_parts_and_one_beyond_the_end_is_refused(shared: httpx.Client):
    got = shared.get(PATH, headers={"Range": "bytes=0-9,1000-1009"})
    assert got.status_code == 206
    assert got.headers["content-type"].startswith("multipart/byteranges")
    assert [part.partition(b"\r\n\r\n")[2][:10] for part in got.content.split(b"--")[1:3]] == [
        CONTENT[:10],
        CONTENT[1000:1010],
    ]
    assert shared.get(PATH, headers={"Range": f"bytes={len(CONTENT)}-"}).status_code == 416


def test_if_range_gives_the_part_of_the_same_file_and_all_of_another(shared: httpx.Client):
    same, other = f'"{hashlib.sha256(CONTENT).hexdigest()}"', f'"{hashlib.sha256(b"").hexdigest()}"'
    assert shared.get(PATH, headers={"Range": "bytes=5-", "If-Range": same}).content == CONTENT[5:]
    whole = shared.get(PATH, headers={"Range": "bytes=5-", "If-Range": other})
    assert (whole.status_code, whole.content) == (200, CONTENT)


@pytest.mark.parametrize(
    "name",
    [
        "manifest.json",
        "adapter",
        "adapter/",
        "adapter//adapter_config.json",
        "adapter/../adapter/adapter_config.json",
        "..%2F..%2F..%2F..%2Fpostgrad.db",
        "%2e%2e/4/adapter/adapter_config.json",
        "%2Fetc%2Fpasswd",
        "adapter%5Cadapter_config.json",
        "adapter/adapter_config.json%00",
        "Adapter/adapter_config.json",
    ],
)
def test_only_the_names_of_the_manifest_are_served(shared: httpx.Client, name: str):
    # Not by httpx, which resolves the dots before it sends them.
    connection = http.client.HTTPConnection(shared.base_url.host, shared.base_url.port, timeout=20)
    connection.request("GET", f"{JOBS}/j/checkpoints/4/files/{name}")
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["error"]["code"]) == (404, "file_not_found")
    connection.close()


@pytest.mark.parametrize("change", ["link", "linked folder", "truncated", "gone"])
def test_what_is_no_longer_the_file_is_not_served(server: JobServer, api: httpx.Client, tmp_path: Path, change: str):
    folder = ended_job(server) / "checkpoints" / "4" / "adapter"
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "adapter_model.safetensors").write_bytes(b"s" * len(CONTENT))
    weights = folder / "adapter_model.safetensors"
    if change == "truncated":
        weights.write_bytes(CONTENT[:-1])
    elif change == "linked folder":
        folder.rename(folder.with_name("moved"))
        folder.symlink_to(outside)
    else:
        weights.unlink()
    if change == "link":
        weights.symlink_to(outside / "adapter_model.safetensors")
    answer = api.get(f"/j/checkpoints/4/files/{WEIGHTS}")
    assert (answer.status_code, error_of(answer)["code"]) == (400, "model_invalid")
    assert str(server.home) not in answer.text


def test_an_unknown_step_is_a_404_that_names_those_there_are(server: JobServer, api: httpx.Client):
    owner = server.claim("j")
    assert "none yet" in error_of(api.get("/j/checkpoints/4/files"))["message"]
    server.checkpoint("j", owner, 2)
    server.checkpoint("j", owner, 3, announced=False)
    server.checkpoint("j", owner, 4)
    for step in (3, 5, 2**62):
        for tail in ("", f"/{WEIGHTS}"):
            answer = api.get(f"/j/checkpoints/{step}/files{tail}")
            assert (answer.status_code, error_of(answer)["code"]) == (404, "checkpoint_not_found")
            assert "those of steps 2, 4" in error_of(answer)["message"]


@pytest.mark.parametrize(
    "job_uuid",
    [
        "a/checkpoints/3/files/b",
        "a/checkpoints/3",
        "a/checkpoints",
        "checkpoints/3/files",
        "a/checkpoints/3/files/adapter",
        "a/status",
        "files/logs/events",
    ],
)
def test_ids_that_look_like_addresses_are_told_apart(server: JobServer, api: httpx.Client, job_uuid: str):
    ended_job(server, "a", (3,))
    ended_job(server, job_uuid, (7,))
    assert api.get(f"/{job_uuid}/status").json()["job_uuid"] == job_uuid
    assert api.get(f"/{job_uuid}/metrics").json()["job_uuid"] == job_uuid
    assert api.get(f"/{job_uuid}/checkpoints/7/files").json()["job_uuid"] == job_uuid
    assert api.get(f"/{job_uuid}/checkpoints/7/files/{WEIGHTS}").content == CONTENT
    assert api.get("/a/checkpoints/3/files").json()["job_uuid"] == "a"
    assert api.get(f"/a/checkpoints/3/files/{WEIGHTS}").content == CONTENT
    assert api.delete(f"/{job_uuid}").status_code == 204
    assert [job.job_uuid for job in server.store.summaries()] == ["a"]


# -- deleted ---------------------------------------------------------------------------------------------------------


def test_a_deleted_job_is_gone_with_its_models_and_files_and_nothing_else_is(server: JobServer, api: httpx.Client):
    folder = ended_job(server, "lab/Job-1", (2, 4))
    other = ended_job(server, "other")
    alias = RegisterModelRequest(model_id="tickets", provider_model_id="base-sft-lab/Job-1-4")
    assert httpx.post(f"{server.url}/v1/models", json=alias.model_dump()).status_code == 200
    assert api.delete("/lab/Job-1").status_code == 204
    assert not folder.exists()
    assert [path.name for path in (server.home / "jobs").iterdir()] == ["other"]
    assert other.is_dir()
    models = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [model["identifier"] for model in models] == ["base-sft-other-4"]
    assert api.delete("/lab/Job-1").status_code == 404
    # The id is free again, and nothing of the old job is left in its place.
    server.submit("lab/Job-1")
    assert api.get("/lab/Job-1/artifacts").json()["checkpoints"] == []
    assert [event["message"] for event in _events(api)] == ["scheduled: submitted"]


def _events(api: httpx.Client) -> list[dict[str, Any]]:
    return [{"message": line[20:]} for line in api.get("/lab/Job-1/logs").json()["log_lines"]]


def test_a_job_without_files_can_be_deleted(server: JobServer, api: httpx.Client):
    server.submit("j")
    api.post("/j/cancel")
    assert api.delete("/j").status_code == 204
    assert server.store.summaries() == []


@pytest.mark.parametrize("status", [JobStatus.scheduled, JobStatus.in_progress])
def test_a_job_that_has_not_ended_is_kept_whole(server: JobServer, api: httpx.Client, status: JobStatus):
    owner = server.claim("j")
    directory = server.checkpoint("j", owner, 1)
    if status is JobStatus.scheduled:
        server.leases.give_back("j", owner, "the server stopped")
    answer = api.delete("/j")
    assert (answer.status_code, error_of(answer)["code"]) == (400, "conflict")
    assert "cancel it" in error_of(answer)["message"]
    assert directory.is_dir()
    assert api.get("/j/status").json()["status"] == status


def test_a_checkpoint_that_another_job_goes_on_from_is_kept(server: JobServer, api: httpx.Client):
    folder = ended_job(server, "first")
    server.submit("second", model="base-sft-first-4")
    answer = api.delete("/first")
    assert (answer.status_code, error_of(answer)["code"]) == (400, "conflict")
    assert "second" in error_of(answer)["message"]
    assert (folder / "checkpoints" / "4" / "manifest.json").is_file()
    api.post("/second/cancel")
    assert api.delete("/first").status_code == 204


def test_parallel_deletes_have_one_winner(server: JobServer, api: httpx.Client):
    folder = ended_job(server)
    together, codes = threading.Barrier(8), []

    def delete() -> None:
        together.wait()
        codes.append(httpx.delete(f"{server.url}{JOBS}/j", timeout=30).status_code)

    threads = [threading.Thread(target=delete) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == [204] + [404] * 7
    assert not folder.exists()
    assert not any((server.home / "jobs").iterdir())


def test_a_commit_that_fails_puts_the_files_back(server: JobServer, api: httpx.Client):
    folder = ended_job(server)

    def fail(_connection: Any) -> None:
        if any(path.name.startswith(".deleted-") for path in folder.parent.iterdir()):
            raise OperationalError("COMMIT", None, Exception("away"))

    database_event.listen(server.database.engine, "commit", fail)
    answer = api.delete("/j")
    database_event.remove(server.database.engine, "commit", fail)
    assert answer.status_code in (500, 503)
    assert [path.name for path in folder.parent.iterdir()] == ["j"]
    assert api.get(f"/j/checkpoints/4/files/{WEIGHTS}").content == CONTENT
    assert api.delete("/j").status_code == 204


_DIE = """
import os, sys
from pathlib import Path
from functools import partial
from post_training import job_files
from post_training.catalog.models import ModelCatalog
from post_training.jobs.database import Database
from post_training.jobs.store import JobStore
home, where, job = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
database = Database(f"sqlite:///{home / 'postgrad.db'}")
die = lambda *_, **__: os._exit(9)
if where == "renamed": job_files.fsync = die
if where == "committed": job_files.shutil.rmtree = die
job_files.delete_job(home, JobStore(database), job, partial(ModelCatalog(database, home).remove_job, job_uuid=job))
"""


@pytest.mark.parametrize("where", ["renamed", "committed"])
def test_a_server_killed_in_a_deletion_finds_the_job_whole_or_gone(server: JobServer, api: httpx.Client, where: str):
    job_uuid = "Lab/" + "long-" * 30 + "J"  # its folder's name is not the id
    folder = ended_job(server, job_uuid)
    died = subprocess.run([sys.executable, "-c", _DIE, str(server.home), where, job_uuid], check=False, timeout=60)
    assert died.returncode == 9
    assert [path.name[:9] for path in folder.parent.iterdir()] == [".deleted-"]
    finish_deletions(server.home, server.store)
    left = [path.name for path in folder.parent.iterdir()]
    if where == "committed":
        assert left == []
        with pytest.raises(JobNotFound):
            server.store.get(job_uuid)
    else:
        assert left == [folder_name(job_uuid)]
        assert api.get(f"/{job_uuid}/checkpoints/4/files/{WEIGHTS}").content == CONTENT
        assert httpx.get(f"{server.url}/v1/models/base-sft-{job_uuid}-4").status_code == 200


def test_what_cannot_be_told_is_left_where_it_lies(server: JobServer):
    folder = ended_job(server)
    hidden = folder.with_name(".deleted-01234567-j")
    hidden.mkdir()
    (hidden / "kept").touch()
    finish_deletions(server.home, server.store)
    assert sorted(os.listdir(folder.parent)) == [".deleted-01234567-j", "j"]
    finish_deletions(server.home / "nowhere", server.store)


@pytest.mark.parametrize("asked", ["bytes=5-2", "bytes=", "bytes=abc", "items=0-1", "bytes=-", "bytes=1-2,x"])
def test_a_range_that_is_none_counts_as_none(shared: httpx.Client, asked: str):
    answer = shared.get(PATH, headers={"range": asked})
    assert (answer.status_code, answer.content) == (200, CONTENT)


@pytest.mark.parametrize(
    ("tags", "status"), [("{}", 304), ('W/{}, "other"', 304), ("*", 304), ('"other"', 200), ("{}x", 200)]
)
def test_a_reader_who_has_the_file_is_told_so(shared: httpx.Client, tags: str, status: int):
    etag = shared.head(PATH).headers["etag"]
    answer = shared.get(PATH, headers={"if-none-match": tags.format(etag)})
    assert (answer.status_code, answer.headers["etag"]) == (status, etag)
    assert answer.content == (b"" if status == 304 else CONTENT)
