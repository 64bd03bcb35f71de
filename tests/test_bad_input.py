"""Whatever is wrong with a request is said at once, by field or row, in the wire's envelope; nothing is left behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from post_training.catalog.importing import import_model
from tests.served_stack import served
from tests.tiny_llama import save_tiny_llama

SUBMIT = "/v1alpha/post-training/supervised-fine-tune"
GOOD_ROW = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    tiny = save_tiny_llama(folder / "tiny", context=256)
    import_model(str(tiny), "tiny", folder / "home")
    import_model(str(tiny), "damaged", folder / "home")
    for weights in (folder / "home" / "models" / "damaged").glob("*.safetensors"):
        weights.unlink()
    other = shutil.copytree(tiny, folder / "gemma2")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "gemma2"}))
    import_model(str(other), "gemma2", folder / "home")
    return folder / "home"


@pytest.fixture(scope="module")
def http(home: Path) -> Iterator[httpx.Client]:
    with served(home) as (url, _), httpx.Client(base_url=url, timeout=30) as client:
        register = {"dataset_id": "good", "source": {"type": "rows", "rows": [GOOD_ROW]}}
        assert client.post("/v1beta/datasets", json=register).status_code == 200
        yield client


def body(**changes: Any) -> dict[str, Any]:
    """A right request with `training_config.data_config.x`-style changes; a value of `...` removes the field."""
    request: dict[str, Any] = {
        "job_uuid": "bad",
        "model": "tiny",
        "training_config": {"data_config": {"dataset_id": "good"}},
        "algorithm_config": {"type": "LoRA"},
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        inside = request
        for parent in parents:
            inside = inside.setdefault(parent, {})
        if value is ...:
            del inside[last]
        else:
            inside[last] = value
    return request


REFUSED: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({"model": "nobody"}, 404, "postgrad models import", "model"),
    ({"model": "../tiny"}, 400, "valid id", "model"),
    ({"model": ...}, 400, "default_model", "model"),
    ({"model": "damaged"}, 400, "safetensors", None),
    ({"model": "gemma2"}, 400, "Gemma 2", None),
    ({"job_uuid": "../../etc"}, 400, "valid id", "job_uuid"),
    ({"job_uuid": "x" * 256}, 400, "255", "job_uuid"),
    ({"job_uuid": ...}, 400, "required", "job_uuid"),
    ({"job_uuid": "x" * 250}, 400, "shorter", "job_uuid"),
    ({"training_config__data_config": ...}, 400, "dataset_id", "training_config.data_config.dataset_id"),
    ({"training_config__data_config__dataset_id": "none"}, 404, "none", None),
    ({"training_config__data_config__validation_dataset_id": "none"}, 404, "none", None),
    ({"training_config__data_config__batch_size": 0}, 400, "1", "training_config.data_config.batch_size"),
    ({"training_config__data_config__batch_size": "many"}, 400, "integer", "training_config.data_config.batch_size"),
    ({"training_config__data_config__max_seq_len": 4000}, 400, "256", "training_config.data_config.max_seq_len"),
    ({"training_config__data_config__data_format": "instruct"}, 400, "chat_completion_input", None),
    ({"training_config__n_epochs": 0}, 400, "1", "training_config.n_epochs"),
    ({"training_config__dtype": "fp8"}, 400, "bf16", "training_config.dtype"),
    ({"training_config__learning_rate": 1}, 400, "no such field", "training_config.learning_rate"),
    ({"training_config__optimizer_config": {"lr": -1}}, 400, "greater than 0", "training_config.optimizer_config.lr"),
    ({"training_config__optimizer_config": {"optimizer_type": "lion"}}, 400, "adam", None),
    ({"algorithm_config__rank": -4}, 400, "greater than or equal to 1", "algorithm_config.rank"),
    ({"algorithm_config__lora_attn_modules": ["x_proj"]}, 400, "q_proj", None),
    (
        {"algorithm_config__use_dora": True, "algorithm_config__quantize_base": True},
        400,
        "choose one",
        "algorithm_config.use_dora",
    ),
    (
        {"algorithm_config": {"type": "QAT", "quantizer_name": "x", "group_size": 8}},
        400,
        "LoRA",
        "algorithm_config.type",
    ),
    (
        {"algorithm_config__lora_attn_modules": [], "algorithm_config__apply_lora_to_mlp": False},
        400,
        "lora_attn_modules",
        "algorithm_config.lora_attn_modules",
    ),
    (
        {"training_config__efficiency_config": {"fsdp_cpu_offload": True}},
        400,
        "single device",
        "training_config.efficiency_config.fsdp_cpu_offload",
    ),
    ({"hyperparam_search_config": {"trials": 3}}, 400, "no effect", "hyperparam_search_config"),
    ({"logger_config": {"level": "x"}}, 400, "no effect", "logger_config"),
    ({"checkpoint_dir": "/etc"}, 400, "allowed root", "checkpoint_dir"),
    ({"checkpoint_dir": "../.."}, 400, "allowed root", "checkpoint_dir"),
    ({"no_such_field": 1}, 400, "no such field", "no_such_field"),
]


@pytest.mark.parametrize(("changes", "status", "says", "param"), REFUSED, ids=lambda value: str(value)[:48])
def test_a_submit_that_cannot_be_honoured_is_refused_by_name(
    http: httpx.Client, changes: dict[str, Any], status: int, says: str, param: str | None
):
    answer = http.post(SUBMIT, json=body(**changes))
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    said = error["message"] + json.dumps(error.get("detail", ""))
    assert says in said, said
    if param is not None:
        assert param in (error["param"] or ""), error
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    "changes",
    [
        {"hyperparam_search_config": {}, "logger_config": None},
        {"training_config__max_steps_per_epoch": 0},
        {"training_config__efficiency_config": {"fsdp_cpu_offload": False, "memory_efficient_fsdp_wrap": None}},
        {"checkpoint_dir": "tiny", "model": ...},
    ],
    ids=str,
)
def test_what_every_client_sends_empty_is_accepted(http: httpx.Client, changes: dict[str, Any]):
    answer = http.post(SUBMIT, json=body(**{**changes, "training_config__n_epochs": 0}))
    # The one thing wrong with it is the epochs, so that nothing starts.
    assert answer.status_code == 400
    assert [e["loc"][-1] for e in answer.json()["error"]["detail"]["errors"]] == ["n_epochs"]


@pytest.mark.parametrize(
    ("row", "pointer", "says"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, "/messages", "assistant"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "/messages/0/role", "robot"),
        ({"messages": [{"role": "user"}, {"role": "assistant", "content": "x"}]}, "/messages/0", "content"),
        ({"messages": "hello"}, "/messages", "string"),
        ({"colour": "red"}, None, "colour"),
    ],
)
def test_a_row_that_does_not_fit_is_named_by_number_and_pointer(
    http: httpx.Client, row: dict[str, Any], pointer: str | None, says: str
):
    name = f"rows-{says}"
    source = {"type": "rows", "rows": [GOOD_ROW, GOOD_ROW, row]}
    http.delete(f"/v1beta/datasets/{name}")
    registered = http.post("/v1beta/datasets", json={"dataset_id": name, "source": source})
    answer = (
        registered
        if registered.status_code != 200
        else http.post(SUBMIT, json=body(training_config__data_config__dataset_id=name))
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == "data_invalid"
    assert "row 2" in error["message"]
    assert says in error["message"]
    if pointer is not None:
        assert pointer in error["message"]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"type": "rows", "rows": []}, "row"),
        ({"type": "uri", "uri": "/etc/passwd"}, "end in"),
        ({"type": "uri", "uri": "/etc/private.csv"}, "root"),
        ({"type": "uri", "uri": "file:///etc/shadow.jsonl"}, "root"),
        ({"type": "uri", "uri": "http://169.254.169.254/latest"}, "http"),
        ({"type": "uri", "uri": "huggingface://datasets/a/b?split=train"}, "allow_hub"),
        ({"type": "uri", "uri": "data:application/jsonl,not json"}, "row 0"),
        ({"type": "uri", "uri": "data:text/csv;base64,!!!"}, "base64"),
        ({"type": "uri", "uri": "no-such-file.jsonl"}, "no-such-file.jsonl"),
    ],
)
def test_a_data_set_that_cannot_be_read_is_refused_when_it_is_registered(
    http: httpx.Client, source: dict[str, Any], says: str
):
    answer = http.post("/v1beta/datasets", json={"dataset_id": "unreadable", "source": source})
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]
    assert http.get("/v1beta/datasets/unreadable").status_code == 404


def test_broken_json_is_a_400(http: httpx.Client):
    answer = http.post(SUBMIT, content=b"{not json", headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "verb"),
    [
        *(("GET", verb) for verb in ("/status", "/artifacts", "/logs", "/logs?tail=3", "/metrics", "/events")),
        *(("GET", f"/checkpoints/1/files{name}") for name in ("", "/adapter/adapter_config.json")),
        ("POST", "/cancel"),
        ("DELETE", ""),
    ],
)
def test_an_unknown_job_is_a_404_on_every_verb(http: httpx.Client, method: str, verb: str):
    answer = http.request(method, f"/v1alpha/post-training/jobs/nobody{verb}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "job_not_found"


@pytest.mark.parametrize(
    ("verb", "headers", "param"),
    [
        ("/logs?tail=0", {}, "tail"),
        ("/logs?tail=10001", {}, "tail"),
        ("/logs?tail=5&after=0", {}, "tail"),
        ("/metrics?limit=0", {}, "limit"),
        ("/metrics?after_step=-1", {}, "after_step"),
        ("/events?after=x", {}, "after"),
        *(("/events", {"Last-Event-ID": value}, "Last-Event-ID") for value in ("x", "-1", "1.5", "1_0", "9" * 19)),
        ("/checkpoints/one/files", {}, "step"),
        (f"/checkpoints/{'9' * 5000}/files", {}, "step"),
    ],
)
def test_a_page_or_place_that_cannot_be_is_refused_by_name(
    http: httpx.Client, verb: str, headers: dict[str, str], param: str
):
    answer = http.get(f"/v1alpha/post-training/jobs/any{verb}", headers=headers)
    assert answer.status_code == 400, answer.text
    assert param in answer.json()["error"]["param"]


def test_preference_optimization_is_a_501_that_is_not_retried(http: httpx.Client):
    request = {
        "job_uuid": "dpo",
        "finetuned_model": "tiny",
        "algorithm_config": {"beta": 0.1},
        "training_config": {"data_config": {"dataset_id": "good"}},
    }
    answer = http.post("/v1alpha/post-training/preference-optimize", json=request)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (501, "false")


def test_nothing_of_all_that_was_left_behind(http: httpx.Client, home: Path):
    assert http.get("/v1alpha/post-training/jobs").json() == {"data": []}
    assert not (home / "jobs").exists()
