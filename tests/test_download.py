"""Checkpoints come to this machine whole, proven by their hashes, or not at all."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from apis.errors import (
    CheckpointNotFound,
    Conflict,
    FileMissing,
    InvalidField,
    JobNotFound,
    ModelInvalid,
    PostgradError,
    Unavailable,
)
from distributions.cli.main import app
from post_training.client import AsyncStackClient, StackClient
from tests.client_session import Session
from tests.in_memory_stack import fault, running
from tests.job_server import ADAPTER, JobServer, job_server

WEIGHTS = "adapter/adapter_model.safetensors"
CONTENT = ADAPTER[WEIGHTS]
MERGED = {"merged/config.json": b"{}", "merged/deep/model.safetensors": b"", **ADAPTER}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[JobServer]:
    with job_server(tmp_path / "home") as made:
        owner = made.claim("lab/j")
        made.checkpoint("lab/j", owner, 3)
        made.checkpoint("lab/j", owner, 6, MERGED)
        yield made


@pytest.fixture(params=["sync", "async"])
def session(request: pytest.FixtureRequest, server: JobServer) -> Iterator[Session]:
    session = Session(request.param, server.url)
    yield session
    session.close()


@pytest.fixture
def client(server: JobServer) -> Iterator[StackClient]:
    with StackClient(server.url) as made:
        yield made


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def ranges(server: JobServer) -> list[str | None]:
    """The Range of each request for the weights, as they came."""
    return [asked for _, path, asked in server.requests if path.endswith(WEIGHTS)]


def below(prefix: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {name.removeprefix(prefix): content for name, content in files.items() if name.startswith(prefix)}


def test_each_form_is_the_folder_that_its_readers_expect(session: Session, tmp_path: Path):
    for form, expected in (
        ("adapter", below("adapter/", ADAPTER)),
        ("merged", below("merged/", MERGED)),
        ("all", MERGED),
    ):
        to = tmp_path / "new" / form
        got = session.do(
            lambda client, to=to, form=form: client.post_training.download_checkpoint("lab/j", 6, to, form)
        )
        assert got == to
        assert tree(to) == expected
    assert sorted(os.listdir(tmp_path / "new")) == ["adapter", "all", "merged"]


def test_the_files_are_listed(session: Session):
    files = session.do(lambda client: client.post_training.checkpoint_files("lab/j", 3))
    assert {file.name: file.size for file in files} == {name: len(content) for name, content in ADAPTER.items()}
    with pytest.raises(CheckpointNotFound, match="steps 3, 6"):
        session.do(lambda client: client.post_training.checkpoint_files("lab/j", 4))


def test_a_file_that_is_cut_goes_on_where_it_was(server: JobServer, session: Session, tmp_path: Path):
    server.cut_after = [10**6, 1000, 0, 50_000]  # adapter_config.json comes first
    seen: list[tuple[int, int]] = []
    session.do(
        lambda client: client.post_training.download_checkpoint(
            "lab/j", 3, tmp_path / "to", on_progress=lambda here, whole: seen.append((here, whole))
        )
    )
    assert tree(tmp_path / "to") == below("adapter/", ADAPTER)
    assert ranges(server)[0] is None
    starts = [int(asked.removeprefix("bytes=").removesuffix("-")) for asked in ranges(server)[1:] if asked]
    assert len(starts) >= 2
    assert starts == sorted(starts)
    whole = len(CONTENT) + len(ADAPTER["adapter/adapter_config.json"])
    assert seen[-1] == (whole, whole)


def test_a_download_that_was_broken_off_goes_on_the_next_time(server: JobServer, client: StackClient, tmp_path: Path):
    def break_off(here: int, _whole: int) -> None:
        if here > 1000:
            raise KeyboardInterrupt

    to = tmp_path / "to"
    with pytest.raises(KeyboardInterrupt):
        client.post_training.download_checkpoint("lab/j", 3, to, on_progress=break_off)
    assert not to.exists()
    [partial] = [path for path in tmp_path.iterdir() if path.name.startswith(".to.partial-")]
    here = (partial / "adapter_model.safetensors").stat().st_size
    assert here > 1000
    client.post_training.download_checkpoint("lab/j", 3, to)
    assert tree(to) == below("adapter/", ADAPTER)
    if here < len(CONTENT):
        assert ranges(server) == [None, f"bytes={here}-"]
    assert not partial.exists()


@pytest.mark.parametrize("left", [b"wrong" * 10, CONTENT[:100] + b"?" + CONTENT[101:], CONTENT + b"more"])
def test_what_an_earlier_download_left_is_not_trusted(
    server: JobServer, client: StackClient, tmp_path: Path, left: bytes
):
    with pytest.raises(KeyboardInterrupt):
        client.post_training.download_checkpoint("lab/j", 3, tmp_path / "to", on_progress=_interrupt)
    [partial] = tmp_path.glob(".to.partial-*")
    (partial / "adapter_model.safetensors").write_bytes(left)
    client.post_training.download_checkpoint("lab/j", 3, tmp_path / "to")
    assert tree(tmp_path / "to") == below("adapter/", ADAPTER)


def _interrupt(_here: int, _whole: int) -> None:
    raise KeyboardInterrupt


def test_a_file_that_differs_from_its_hash_is_never_put_in_place(
    server: JobServer, client: StackClient, tmp_path: Path
):
    stored = server.home / "jobs" / "lab%2Fj" / "checkpoints" / "3" / WEIGHTS
    stored.write_bytes(b"x" * len(CONTENT))
    with pytest.raises(ModelInvalid, match="differs from its sha256"):
        client.post_training.download_checkpoint("lab/j", 3, tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_a_server_that_goes_away_ends_the_download_and_keeps_what_came(
    server: JobServer, client: StackClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("post_training.client.waiting.OUTAGE_SECONDS", 0.0)
    server.cut_after = [10**6, 5000]
    with pytest.raises(Unavailable):
        client.post_training.download_checkpoint("lab/j", 3, tmp_path / "to")
    [partial] = tmp_path.glob(".to.partial-*")
    assert (partial / "adapter_model.safetensors").read_bytes() == CONTENT[:5000]


def test_a_target_that_holds_something_is_left_alone(server: JobServer, client: StackClient, tmp_path: Path):
    full, file, empty = tmp_path / "full", tmp_path / "file", tmp_path / "empty"
    full.mkdir()
    (full / "mine").write_text("mine")
    file.write_text("mine")
    empty.mkdir()
    before = len(server.requests)
    for to in (full, file, file / "below"):
        with pytest.raises(InvalidField) as caught:
            client.post_training.download_checkpoint("lab/j", 3, to)
        assert caught.value.param == "to"
    assert len(server.requests) - before <= 1  # nothing was fetched
    assert tree(full) == {"mine": b"mine"}
    assert client.post_training.download_checkpoint("lab/j", 3, empty) == empty
    assert tree(empty) == below("adapter/", ADAPTER)


def test_two_downloads_never_write_to_the_same_files(client: StackClient, tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        client.post_training.download_checkpoint("lab/j", 3, tmp_path / "to", on_progress=_interrupt)
    [partial] = tmp_path.glob(".to.partial-*")
    other = os.open(partial, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(Conflict, match="another download"):
        client.post_training.download_checkpoint("lab/j", 3, tmp_path / "to")
    os.close(other)
    client.post_training.download_checkpoint("lab/j", 3, tmp_path / "to")


def test_a_form_that_is_not_there_or_unknown_is_refused(client: StackClient, tmp_path: Path):
    with pytest.raises(FileMissing, match=r"no merged form.*export --merged"):
        client.post_training.download_checkpoint("lab/j", 3, tmp_path / "to", "merged")
    with pytest.raises(InvalidField, match="adapter, merged, all"):
        client.post_training.download_checkpoint("lab/j", 3, tmp_path / "to", "gguf")  # type: ignore[arg-type]
    with pytest.raises(JobNotFound):
        client.post_training.download_checkpoint("nobody", 3, tmp_path / "to")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "a//b", "./a", "..\\evil", "", "a/"])
def test_a_name_that_would_leave_the_folder_is_refused(tmp_path: Path, name: str):
    file = {"name": f"adapter/{name}", "size": 1, "sha256": "0" * 64}
    with running() as stack, StackClient(stack.url) as client:
        stack.faults.append(fault(200, {"job_uuid": "j", "step": 1, "data": [file]}))
        with pytest.raises(PostgradError, match="would not lie in the folder"):
            client.post_training.download_checkpoint("j", 1, tmp_path / "to")
    assert list(tmp_path.iterdir()) == []


def test_a_cancelled_download_stops(server: JobServer, tmp_path: Path):
    async def broken_off() -> None:
        started = asyncio.Event()
        loop = asyncio.get_running_loop()
        async with AsyncStackClient(server.url) as client:
            download = asyncio.create_task(
                client.post_training.download_checkpoint(
                    "lab/j", 3, tmp_path / "to", on_progress=lambda *_: loop.call_soon_threadsafe(started.set)
                )
            )
            server.cut_after = [10**6, *[0] * 1000]
            await started.wait()
            download.cancel()
            with pytest.raises(asyncio.CancelledError):
                await download

    asyncio.run(broken_off())  # would wait for its threads
    assert not (tmp_path / "to").exists()


# -- on the command line ---------------------------------------------------------------------------------------------


def run(server: JobServer, *arguments: str, code: int = 0, **options: Any) -> str:
    result = CliRunner().invoke(app, ["--endpoint", server.url, *arguments], **options)
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def test_models_download_takes_any_name_of_a_checkpoint(
    server: JobServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    to = str(tmp_path / "named")
    assert run(server, "models", "download", "base-sft-lab/j-6", "--to", to, "--form", "merged") == f"{to}\n"
    assert tree(Path(to)) == below("merged/", MERGED)
    # Left out: the last part of the id.
    assert run(server, "models", "download", "base-sft-lab/j-3") == f"{tmp_path / 'j-3'}\n"
    assert tree(tmp_path / "j-3") == below("adapter/", ADAPTER)
    assert "not an empty folder" in run(server, "models", "download", "base-sft-lab/j-3", code=1)


def test_what_is_no_checkpoint_cannot_be_downloaded(server: JobServer, tmp_path: Path):
    base = server.home / "models" / "base"
    base.mkdir(parents=True)
    (base / "config.json").write_text("{}")
    with server.database.session() as session:
        server.models.add_base(session, "base", base, {})
    assert "no checkpoint of a job" in run(server, "models", "download", "base", code=1)
    assert "there is no model" in run(server, "models", "download", "nobody", code=1)


def test_metrics_are_printed_as_a_table_and_whole_as_json(server: JobServer):
    owner = server.claim("m")
    for step in range(1, 1202):
        server.step("m", owner, step, tokens_per_second=1234.5, memory_bytes=3 * 2**20, skipped=step == 2)
    header, *rows = run(server, "post_training", "metrics", "m").splitlines()
    assert header.split() == ["STEP", "EPOCH", "LOSS", "LR", "GRAD", "NORM", "TOKENS/S", "SUPERVISED", "MEMORY"]
    assert len(rows) == 1201
    assert rows[3].split() == ["4", "0", "0.2500", "0.0001", "0.5", "1,234", "-", "3", "MiB"]
    assert rows[1].split()[2] == "skipped"
    answer = json.loads(run(server, "post_training", "metrics", "m", "--json"))
    assert [one["step"] for one in answer["data"]] == list(range(1, 1202))
    assert answer["next"] == 1201


def test_logs_begin_with_the_tail_and_go_on(server: JobServer):
    owner = server.claim("t")
    for step in range(1, 31):
        server.step("t", owner, step)
    server.finish("t", owner)
    shown = run(server, "post_training", "logs", "t", "--tail", "2", "--follow").splitlines()
    assert [line[20:] for line in shown] == ["step 30", "completed: done"]
    assert len(run(server, "post_training", "logs", "t").splitlines()) == 33


def test_delete_asks_only_on_a_terminal(server: JobServer, monkeypatch: pytest.MonkeyPatch):
    owner = server.claim("d")
    assert "give --yes" in run(server, "post_training", "delete", "d", code=2)
    assert "cancel it" in run(server, "post_training", "delete", "d", "--yes", code=1)
    server.finish("d", owner)
    monkeypatch.setattr("distributions.cli.post_training.is_terminal", lambda: True)
    assert "Delete job d with its 0 checkpoints" in run(server, "post_training", "delete", "d", input="n\n", code=1)
    assert server.store.get("d").status == "completed"
    run(server, "post_training", "delete", "d", input="y\n")
    assert "d" not in [job.job_uuid for job in server.store.summaries()]
