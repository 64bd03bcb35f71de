"""A preflight says before a job what the job will say: the same errors, the same report, and what it will take."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from typer.testing import CliRunner

from apis.errors import Conflict, DataInvalid
from apis.post_training.models import JobStatus, LoraFinetuningConfig, PreflightRequest, SupervisedFineTuneRequest
from apis.post_training.reports import PreflightReport
from distributions.cli.main import app
from distributions.cli.preflight import print_report
from post_training.catalog.importing import import_model
from post_training.client import StackClient
from post_training.jobs.spec import JobSpec
from post_training.preflight_job import AT_ONCE, PREFLIGHT_MODULE, Preflights
from post_training.worker import announcing
from tests.client_session import Session
from tests.in_memory_stack import BASE_MODEL, InMemoryStack, running
from tests.job_bench import Bench, VerifierHere, rows
from tests.served_stack import served
from tests.test_bad_input import REFUSED, SUBMIT, body, home

__all__ = ["home"]

PREFLIGHT = "/v1alpha/post-training/preflight"


@pytest.fixture(scope="module")
def stack(home: Path) -> Iterator[tuple[StackClient, int]]:
    """A client of a served stack, and the server's process."""
    with served(home) as (url, process), StackClient(url, timeout=60) as client:
        row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
        client.datasets.register({"type": "rows", "rows": [row]}, dataset_id="good")
        yield client, process.pid


@pytest.fixture
def client(stack: tuple[StackClient, int]) -> StackClient:
    return stack[0]


@pytest.fixture(scope="module")
def http(stack: tuple[StackClient, int]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack[0]._transport.settings.base_url, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def tiny(home: Path) -> Path:
    return home / "models" / "tiny"


def request(dataset: str, **training: Any) -> dict[str, Any]:
    data = {"dataset_id": dataset, "batch_size": 3, "max_seq_len": 40, **training.pop("data_config", {})}
    config = {"n_epochs": 2, "dtype": "fp32", **training, "data_config": data}
    return {"model": "tiny", "training_config": config, "algorithm_config": {"rank": 4, "alpha": 8, "type": "LoRA"}}


def plain(report: PreflightReport) -> dict[str, Any]:
    return report.model_dump(mode="json", exclude_unset=True)


# -- the same as the job's -------------------------------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Jobs that run in this process."""
    monkeypatch.setattr(announcing, "Verifier", VerifierHere)
    return Bench(tmp_path / "bench", tiny)


def looked_at(bench: Bench, spec: JobSpec) -> dict[str, Any]:
    """The report of a preflight, read by a process of its own."""
    return plain(anyio.run(Preflights(bench.store.database, bench.home).report, spec, "cpu"))


@pytest.mark.parametrize(
    "training",
    [
        {},
        {"data_config": {"packed": True, "batch_size": 1}, "gradient_accumulation_steps": 2},
        {"data_config": {"validation_split": 0.3, "on_overlength": "drop", "max_seq_len": 60}},
        {"max_steps_per_epoch": 2, "optimizer_config": {"num_warmup_steps": 1}, "validation": rows(3)},
    ],
    ids=["plain", "packed", "split", "short"],
)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_the_report_before_a_job_is_the_report_of_the_job(bench: Bench, training: dict[str, Any]):
    spec = bench.submit("job", rows(11), **training)
    before = looked_at(bench, spec)
    outcome = bench.run(spec)
    assert outcome.status == JobStatus.completed
    report = dict(bench.store.get("job").report or {})
    del report["computation"]  # known once the model is loaded
    assert report == before
    assert outcome.progress["step"] == outcome.progress["total_steps"] == before["total_steps"]
    assert before["dataset"]["rows"] == 11


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_time_is_unknown_until_a_job_like_it_has_completed_and_then_follows_its_speed(bench: Bench):
    first = bench.submit("first", rows(6))
    note = looked_at(bench, first)["time"]
    assert (note["seconds"], note["tokens_per_second"], note["jobs"]) == (None, None, 0)
    assert note["note"] == "unknown: no job has completed on tiny in fp32 on a cpu device here yet"
    bench.run(first)
    progress = bench.store.get("first").progress
    assert progress is not None
    second = looked_at(bench, bench.submit("second", rows(6)))["time"]
    assert (second["jobs"], second["tokens_per_second"]) == (1, progress["tokens_per_second"])
    assert second["seconds"] == pytest.approx(progress["tokens_seen"] / progress["tokens_per_second"])
    assert looked_at(bench, bench.submit("other", rows(6), dtype="bf16"))["time"]["jobs"] == 0


def test_a_preflight_leaves_no_job_behind(client: StackClient):
    before = client.post_training.jobs()
    client.post_training.preflight(**request("good"), job_uuid="only-looked-at")
    assert client.post_training.jobs() == before


# -- the same errors as a submit -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "status", "words", "param"), REFUSED)
def test_what_a_submit_refuses_a_preflight_refuses_in_the_same_words(
    http: httpx.Client, changes: dict[str, Any], status: int, words: str, param: str | None
):
    submitted, looked_at = (http.post(path, json=body(**changes)) for path in (SUBMIT, PREFLIGHT))
    if changes == {"job_uuid": ...}:
        assert looked_at.status_code == 200
        return
    assert looked_at.status_code == submitted.status_code == status
    assert looked_at.json()["error"] == submitted.json()["error"]
    assert words in looked_at.text


def test_the_id_of_another_job_is_refused_and_that_of_the_same_job_is_not(client: StackClient):
    asked = request("good", n_epochs=1)
    client.post_training.supervised_fine_tune(job_uuid="known", **asked)
    client.post_training.cancel("known")
    assert client.post_training.preflight(job_uuid="known", **asked).total_steps == 1
    with pytest.raises(Conflict) as refused:
        client.post_training.preflight(job_uuid="known", **request("good", n_epochs=2))
    assert refused.value.param == "job_uuid"


def test_a_bad_row_far_down_is_named_by_row_and_pointer(client: StackClient):
    bad = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": 5}]}
    good = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    client.datasets.register({"type": "rows", "rows": [*[good] * 1500, bad]}, dataset_id="bad-far-down")
    with pytest.raises(DataInvalid, match="'bad-far-down', row 1500") as refused:
        client.post_training.preflight(**request("bad-far-down"))
    assert (refused.value.row, refused.value.pointer) == (1500, "/messages/1/content")
    assert refused.value.param == "training_config.data_config.dataset_id"


def test_a_row_that_only_its_tokens_show_to_be_bad_is_named(client: StackClient):
    long = {"prompt": "word " * 100, "completion": "x"}
    client.datasets.register({"type": "rows", "rows": [*rows(2), long]}, dataset_id="one-long")
    with pytest.raises(DataInvalid, match="more than max_seq_len 40") as refused:
        client.post_training.preflight(**request("one-long", data_config={"on_overlength": "error"}))
    assert refused.value.row == 2


def test_every_field_of_a_submit_is_a_field_of_a_preflight():
    assert PreflightRequest.model_fields.keys() == SupervisedFineTuneRequest.model_fields.keys()
    asked = PreflightRequest(model="m", algorithm_config=LoraFinetuningConfig(rank=3))
    job = asked.as_job("j")
    assert job == SupervisedFineTuneRequest(job_uuid="j", model="m", algorithm_config=LoraFinetuningConfig(rank=3))
    assert job.algorithm_config is not None
    assert job.algorithm_config.model_fields_set == {"rank"}  # what is left out is taken from an earlier adapter


def test_configs_may_be_json_in_strings_as_the_legacy_command_line_sends_them(http: httpx.Client):
    asked = request("good")
    strings = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in asked.items()}
    assert http.post(PREFLIGHT, json=strings).json() == http.post(PREFLIGHT, json=asked).json()


# -- the process -----------------------------------------------------------------------------------------------------


def test_the_process_that_reads_loads_no_torch():
    program = (
        f"import sys, {PREFLIGHT_MODULE}; "
        "print(sorted({'torch', 'transformers', 'datasets', 'sqlalchemy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def children(pid: int, module: str) -> list[int]:
    """The processes of a module of ours that `pid` started and that run now."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == pid and module in stat.with_name("cmdline").read_text():
                found.append(int(stat.parent.name))
    return found


def peak_memory(pid: int) -> int:
    """The most bytes that the process ever had in memory."""
    (kibibytes,) = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(kibibytes) * 1024


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="counts processes in /proc")
def test_two_preflights_run_at_a_time_others_wait_and_the_server_answers_meanwhile(stack: tuple[StackClient, int]):
    client, pid = stack
    many = [{"prompt": f"{n} words", "completion": "more words " * 5} for n in range(3000)]
    client.datasets.register({"type": "rows", "rows": many}, dataset_id="many")
    answers: list[PreflightReport] = []

    def ask(seed: int) -> None:
        # Each has a length of its own, so that none finds another's tokens in the cache.
        asked = request("many", data_config={"max_seq_len": 60 + seed})
        answers.append(client.post_training.preflight(**asked))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(2 * AT_ONCE)]
    for thread in threads:
        thread.start()
    most, slowest = 0, 0.0
    while any(thread.is_alive() for thread in threads):
        most = max(most, len(children(pid, PREFLIGHT_MODULE)))
        began = time.monotonic()
        client.inspect.health()
        client.post_training.jobs()
        slowest = max(slowest, time.monotonic() - began)
    assert most == AT_ONCE
    assert [answer.dataset.rows for answer in answers] == [3000] * len(threads)
    assert slowest < 2  # a core is busy in each of the two processes, and in this one


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads the peak in /proc")
def test_the_memory_estimate_is_within_a_factor_of_2_of_a_real_job_s_peak(tmp_path: Path, smollm2: Path):
    home = tmp_path / "home"
    import_model(str(smollm2), "smollm2", home)
    with served(home) as (url, process), StackClient(url, timeout=60) as client:
        long = [{"prompt": f"{n}: " + "Tell me more. " * 40, "completion": "Indeed. " * 40} for n in range(3)]
        client.datasets.register({"type": "rows", "rows": long}, dataset_id="long")
        data = {"max_seq_len": 512, "batch_size": 3}
        asked = {**request("long", n_epochs=9, device="cpu", data_config=data), "model": "smollm2"}
        estimate = client.post_training.preflight(**asked).memory
        client.post_training.supervised_fine_tune(job_uuid="peak", **asked)
        while not client.post_training.metrics("peak").data:
            assert not client.post_training.status("peak").status.terminal
            time.sleep(0.05)
        peak = sum(peak_memory(worker) for worker in children(process.pid, "post_training.worker.main"))
    print(f"estimated {estimate.total_bytes / 2**20:.0f} MiB, measured {peak / 2**20:.0f} MiB")
    assert 0.5 < estimate.total_bytes / peak < 2
    # Tied weights and what this shape trains are known exactly.
    assert estimate.base_bytes == 134_515_008 * 4


# -- client and command line -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def memory_server() -> Iterator[InMemoryStack]:
    with running() as made:
        yield made


@pytest.fixture
def memory_stack(memory_server: InMemoryStack, monkeypatch: pytest.MonkeyPatch) -> InMemoryStack:
    memory_server.reset()
    monkeypatch.setenv("POSTGRAD_BASE_URL", memory_server.url)
    monkeypatch.delenv("POSTGRAD_API_KEY", raising=False)
    return memory_server


ROWS = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"ho {n}"}]} for n in range(3)
]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_both_clients_have_the_verb(memory_stack: InMemoryStack, kind: str):
    session = Session(kind, memory_stack.url)
    session.do(lambda client: client.datasets.register({"type": "rows", "rows": ROWS}, dataset_id="tickets"))
    config = {"n_epochs": 2, "data_config": {"dataset_id": "tickets"}}
    report = session.do(lambda client: client.post_training.preflight(model=BASE_MODEL, training_config=config))
    session.close()
    assert isinstance(report, PreflightReport)
    assert (report.dataset.rows, report.total_steps, report.dataset.dropped.first_rows) == (3, 4, [2])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "tickets.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def run(data: Path, *more: str) -> str:
    arguments = ["post_training", "preflight", "--model", BASE_MODEL, "--dataset", str(data), "--epochs", "2", *more]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_prints_a_short_report_with_the_learnt_text_marked(memory_stack: InMemoryStack, data: Path):
    out = run(data, "--max-seq-len", "64")
    assert re.search(r"^rows +2 of 3$", out, re.M)
    assert re.search(r"^tokens +12, of them 6 supervised$", out, re.M)
    assert re.search(r"^dropped +1 row, no supervised token: 2$", out, re.M)
    assert re.search(r"^steps +4, 2 an epoch, 0 of warm-up; rows of up to 64 tokens$", out, re.M)
    assert re.search(r"^memory +about 1.50 GiB on cpu \(base 0.75, adapter 0.06,", out, re.M)
    assert re.search(r"^time +unknown: no job yet$", out, re.M)
    assert out.endswith("user: hi\n«ho 0»\n")
    assert memory_stack.post_training.jobs == {}


def test_with_json_the_command_prints_the_report_itself(memory_stack: InMemoryStack, data: Path):
    report = PreflightReport.model_validate_json(run(data, "--json"))
    assert (report.total_steps, report.dataset.sample[1].text) == (4, "ho 0")


def test_on_a_terminal_the_learnt_text_is_coloured_and_not_quoted(memory_stack: InMemoryStack, data: Path):
    report = PreflightReport.model_validate_json(run(data, "--json"))
    leader, follower = os.openpty()
    with os.fdopen(follower, "w") as terminal, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm-256color")
        patch.delenv("NO_COLOR", raising=False)
        with contextlib.redirect_stdout(terminal):
            print_report(report)
    shown = b""
    with contextlib.suppress(OSError):  # its end
        while piece := os.read(leader, 100_000):
            shown += piece
    os.close(leader)
    shown = shown.decode()
    assert re.search("\x1b\\[[0-9;]*32m" + "ho 0", shown)
    assert "«" not in shown


def test_a_refusal_is_one_line_on_stderr(memory_stack: InMemoryStack, data: Path):
    result = CliRunner().invoke(app, ["post_training", "preflight", "--model", "nobody", "--dataset", str(data)])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: model 'nobody' is not registered")


def test_the_report_is_readable_where_rows_are_cut_and_the_speed_is_known(capsys: pytest.CaptureFixture[str]):
    none, many = {"count": 0, "first_rows": []}, {"count": 30, "first_rows": list(range(20))}
    data = {
        "rows": 1234567, "format": "text", "tokens": 10, "supervised_tokens": 9, "longest_row_tokens": 5000,
        "truncated": many, "dropped": {**none, "overlength": none, "unsupervised": none}, "control_tokens": none,
        "sample": [], "fingerprint": "",
    }  # fmt: skip
    sizes = {f"{part}_bytes": 2**30 for part in ("base", "adapter", "activation", "logit", "runtime", "total")}
    whole = {
        "dataset": data, "validation_split": {"training_rows": 9, "validation_rows": 1}, "seed": 0, "max_seq_len": 64,
        "n_epochs": 1, "batch_size": 8, "lr": 5.7e-4, "steps_per_epoch": 1, "total_steps": 1, "warmup_steps": 0,
        "tokens_per_epoch": 1, "largest_step_tokens": 1,
        "longest_kept_tokens": 1, "trainable_parameters": 1, "memory": {"device_kind": "cpu", **sizes},
        "time": {"seconds": 3725.0, "tokens_per_second": 1000.4, "jobs": 2, "note": "by the speed of 2 jobs"},
    }  # fmt: skip
    print_report(PreflightReport.model_validate(whole))
    out = capsys.readouterr().out
    assert re.search(r"^rows +1,234,567$", out, re.M)
    assert re.search(r"^truncated +30 rows: 0, 1, .*19, …$", out, re.M)
    assert re.search(r"^held back +1 rows to validate, 9 to train on$", out, re.M)
    assert re.search(r"^training +1 epoch, batches of 8, learning rate 0.00057$", out, re.M)
    assert re.search(r"^time +about 1:02:05 at 1,000 tokens/s, by the speed of 2 jobs$", out, re.M)
    assert not re.search(r"^dropped", out, re.M)
