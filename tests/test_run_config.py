"""Reading a run.yaml: templates, users' own files, and every way one can be wrong."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from apis.common import Api
from apis.errors import EnvironmentUnset, RunConfigInvalid, UnknownTemplate
from distributions.run_config import StackRunConfig, load_run_config, template_names

TEMPLATE = "experimental-post-training"


def load(tmp_path: Path, text: str, **environ: str) -> StackRunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_run_config(str(path), {"HOME": "/home/user", **environ})


def test_the_template_reads_as_written():
    config = load_run_config(TEMPLATE, {"HOME": "/home/user"})
    assert config.image_name == TEMPLATE
    assert {api: [e.provider_type for e in entries] for api, entries in config.providers.items()} == {
        Api.inference: ["inline::transformers"],
        Api.datasetio: ["inline::localfs"],
        Api.post_training: ["inline::torchtune"],
    }
    assert config.providers[Api.post_training][0].config == {"checkpoint_format": "huggingface", "default_model": None}
    assert config.home == Path("/home/user/.postgrad")
    assert config.metadata_store.sqlalchemy_url(config.home) == "sqlite:////home/user/.postgrad/postgrad.db"
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8321)


def test_the_template_takes_its_settings_from_the_environment():
    config = load_run_config(TEMPLATE, {"POSTGRAD_HOME": "/srv/pg", "POSTGRAD_DEFAULT_MODEL": "org/base"})
    assert config.home == Path("/srv/pg")
    assert config.metadata_store.db_path == "/srv/pg/postgrad.db"
    assert config.providers[Api.post_training][0].config["default_model"] == "org/base"


def test_an_unknown_template_is_answered_with_the_known_ones():
    with pytest.raises(UnknownTemplate, match=TEMPLATE) as caught:
        load_run_config("experimental-post-trainin", {})
    assert "experimental-post-trainin'" in caught.value.message


def test_a_folder_stands_for_its_run_yaml(tmp_path: Path):
    (tmp_path / "run.yaml").write_text("version: 2\nimage_name: mine\n")
    assert load_run_config(str(tmp_path), {}).image_name == "mine"


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(RunConfigInvalid, match=r"no file .*absent\.yaml"):
        load_run_config(str(tmp_path / "absent.yaml"), {})


# The top-level keys and values are those of the run.yaml that Llama Stack 0.2.2 shipped for this distribution.
UPSTREAM = """
version: '2'
image_name: experimental-post-training
container_image: null
conda_env: experimental-post-training
apis: [agents, datasetio, eval, inference, vector_io, safety, scoring, telemetry, post_training, tool_runtime]
providers:
  inference:
  - provider_id: meta-reference-inference
    provider_type: inline::meta-reference
    config: {max_seq_len: 4096}
  eval:
  - provider_id: meta-reference
    provider_type: inline::meta-reference
    config: {kvstore: {db_path: "${env.NOT_SET_ANYWHERE}"}}
  datasetio:
  - {provider_id: localfs, provider_type: inline::localfs, config: {}}
  - {provider_id: huggingface, provider_type: remote::huggingface, config: {}}
  post_training:
  - provider_id: torchtune-post-training
    provider_type: inline::torchtune
    config: {checkpoint_format: huggingface}
  telemetry: []
metadata_store:
  namespace: null
  type: sqlite
  db_path: ${env.SQLITE_STORE_DIR:~/.llama/distributions/experimental-post-training}/registry.db
models: []
shields: []
vector_dbs: []
datasets: []
scoring_fns: [{scoring_fn_id: x}]
benchmarks: []
"""


def test_an_upstream_file_boots_with_one_warning_for_each_thing_that_is_not_ours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        config = load(tmp_path, UPSTREAM)
    assert config.apis == [Api.datasetio, Api.inference, Api.post_training]
    assert set(config.providers) == {Api.inference, Api.datasetio, Api.post_training}
    assert config.metadata_store.db_path == "/home/user/.llama/distributions/experimental-post-training/registry.db"
    messages = [record.getMessage() for record in caplog.records]
    for name in [
        "conda_env",
        "scoring_fns",
        "agents",
        "eval",
        "vector_io",
        "safety",
        "scoring",
        "telemetry",
        "tool_runtime",
    ]:
        assert sum(f"'{name}'" in message for message in messages) == 1, name
    assert len(messages) == 9


def test_a_switched_off_provider_keeps_the_others_places(tmp_path: Path):
    text = """
version: 2
providers:
  post_training:
  - {provider_id: "${env.OTHER:+other}", provider_type: inline::x, config: {key: "${env.UNSET}"}}
  - {provider_id: torchtune, provider_type: inline::torchtune}
"""
    entries = load(tmp_path, text).providers[Api.post_training]
    assert [entry.enabled for entry in entries] == [False, True]
    with pytest.raises(EnvironmentUnset, match=r"providers\.post_training\.0\.config\.key needs .* UNSET"):
        load(tmp_path, text, OTHER="1")


def test_a_null_provider_id_switches_off(tmp_path: Path):
    config = load(tmp_path, "providers: {inference: [{provider_id: null, provider_type: inline::x}]}")
    assert not config.providers[Api.inference][0].enabled


def test_models_and_data_sets_of_a_switched_off_provider_are_left_out(tmp_path: Path):
    text = """
models:
- {model_id: a, provider_id: "${env.UNSET:+x}"}
- {model_id: b}
datasets:
- {dataset_id: d, purpose: post-training/messages, source: {uri: "data:text/csv,a"}}
"""
    config = load(tmp_path, text)
    assert [model.model_id for model in config.models] == ["b"]
    assert config.datasets[0].source.model_dump() == {"type": "uri", "uri": "data:text/csv,a"}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("version: 3", "version: "),
        ("providers: {inference: [{provider_id: a, provider_type: b, config: 7}]}", "providers.inference.0.config: "),
        ("providers: {inference: [{provider_type: b}]}", "providers.inference.0: .*provider_id is missing"),
        ("providers: {inference: [{provider_id: a}]}", "providers.inference.0: .*provider_type is missing"),
        ("providers: {inference: {provider_id: a}}", "providers.inference: "),
        ("providers: [a]", "providers: "),
        ("server: {port: many}", "server.port: "),
        ("server: {port: 70000}", "server.port: "),
        ("server: {tls_certfile: cert.pem}", "server.tls_certfile: "),
        ("metadata_store: {type: redis}", "metadata_store.type: "),
        ("models: [{model_id: ../up}]", "models.0.model_id: "),
        ("datasets: [{dataset_id: d, source: {type: uri}}]", "datasets.0.source.uri.uri: "),
        ("- a list", "a run.yaml is a mapping"),
        ("", "a run.yaml is a mapping"),
    ],
)
def test_a_wrong_value_is_named_by_its_dotted_path(tmp_path: Path, text: str, place: str):
    with pytest.raises(RunConfigInvalid, match=place):
        load(tmp_path, text)


def test_broken_yaml_is_named_by_its_line(tmp_path: Path):
    with pytest.raises(RunConfigInvalid, match=r"run\.yaml, line 2, column 14: not YAML"):
        load(tmp_path, "version: 2\nimage_name: a: b\n")


def test_a_file_that_is_not_text_is_refused(tmp_path: Path):
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RunConfigInvalid, match="UTF-8"):
        load_run_config(str(tmp_path / "run.yaml"), {})


@pytest.mark.parametrize(
    "store",
    [
        "postgresql://user:p%40ss@db:5433/jobs",
        "{type: postgres, url: 'postgresql://user:p%40ss@db:5433/jobs'}",
        "{type: postgres, host: db, port: 5433, db: jobs, user: user, password: p@ss}",
    ],
)
def test_a_postgres_store_is_a_sqlalchemy_url(tmp_path: Path, store: str):
    config = load(tmp_path, f"metadata_store: {store}")
    url = make_url(config.metadata_store.sqlalchemy_url(config.home))
    assert (url.get_backend_name(), url.username, url.password) == ("postgresql", "user", "p@ss")
    assert (url.host, url.port, url.database) == ("db", 5433, "jobs")


def test_the_store_lies_in_the_state_folder_where_nothing_else_is_said(tmp_path: Path):
    config = load(tmp_path, "version: 2", POSTGRAD_HOME="/srv/pg")
    assert config.metadata_store.sqlalchemy_url(config.home) == "sqlite:////srv/pg/postgrad.db"


def test_a_setting_of_the_store_without_effect_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        load(tmp_path, "metadata_store: {type: sqlite, namespace: a, table_name: b}")
        load(tmp_path, "metadata_store: {type: sqlite, namespace: null}")
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "metadata_store: namespace and table_name have no effect: the tables' names are fixed"
    ]


def test_a_name_that_reads_as_a_number_stays_a_name(tmp_path: Path):
    assert load(tmp_path, "image_name: ${env.NAME}", NAME="2024").image_name == "2024"


def test_template_names_are_the_folders_with_a_run_yaml():
    assert TEMPLATE in template_names()
    assert template_names() == sorted(p.parent.name for p in Path("templates").glob("*/run.yaml"))


def test_jobs_run_on_the_devices_that_the_file_names(tmp_path: Path):
    config = load(tmp_path, "jobs: {devices: [cpu, 'cuda:1'], max_queued: 7, max_attempts: 2, warm_seconds: 0.5}")
    settings = config.jobs.settings(config.environ)
    assert [slot.name for slot in settings.slots] == ["cpu:0", "cuda:1"]
    assert (settings.max_queued, settings.max_attempts, settings.warm_seconds) == (7, 2, 0.5)
    left_out = load(tmp_path, "version: 2").jobs
    assert (left_out.max_attempts, left_out.warm_seconds) == (3, 300)


@pytest.mark.parametrize(
    ("jobs", "what"),
    [
        ("{devices: [gpu]}", "jobs.devices: Value error, 'gpu' is no device"),
        ("{devices: cpu}", "jobs.devices"),
        ("{max_queued: 0}", "jobs.max_queued"),
        ("{max_attempts: 0}", "jobs.max_attempts"),
        ("{warm_seconds: -1}", "jobs.warm_seconds"),
        ("{workers: 3}", "jobs.workers"),
    ],
)
def test_a_setting_of_jobs_that_cannot_be_used_is_refused_by_its_path(tmp_path: Path, jobs: str, what: str):
    with pytest.raises(RunConfigInvalid, match=what):
        load(tmp_path, f"jobs: {jobs}")
