"""Bodies of old clients, put into the words of the typed spec. Inputs are what real clients were seen to send."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from apis.datasets.models import RegisterDatasetRequest, URIDataSource
from apis.errors import InvalidField
from apis.post_training.models import LoraFinetuningConfig, QATFinetuningConfig, SupervisedFineTuneRequest
from distributions.dialects.llama_stack_datasets import translate_dataset_registration, translate_provider
from distributions.dialects.llama_stack_v1 import (
    body_translations,
    translate_model_registration,
    translate_preference_optimize,
    translate_supervised_fine_tune,
)
from post_training.worker.hf_sources import parse_hub_uri

CLI_BODY = {
    "hyperparam_search_config": {},
    "job_uuid": "1234",
    "logger_config": {},
    "training_config": '{"n_epochs": 1}',
    "algorithm_config": '{"type": "LoRA", "rank": 8}',
    "checkpoint_dir": None,
    "model": "Llama3.2-3B-Instruct",
}


def test_the_command_line_clients_body_becomes_a_valid_request():
    before = copy.deepcopy(CLI_BODY)
    request = SupervisedFineTuneRequest.model_validate(translate_supervised_fine_tune(CLI_BODY))
    assert request.training_config.n_epochs == 1
    assert isinstance(request.algorithm_config, LoraFinetuningConfig)
    assert request.algorithm_config.rank == 8
    assert before == CLI_BODY


@pytest.mark.parametrize("value", ["", "null", None])
def test_a_checkpoint_dir_that_means_none_is_none(value: str | None):
    assert translate_supervised_fine_tune({"checkpoint_dir": value}) == {"checkpoint_dir": None}


def test_a_real_checkpoint_dir_is_kept():
    assert translate_supervised_fine_tune({"checkpoint_dir": "runs/a"}) == {"checkpoint_dir": "runs/a"}


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [
        ({"rank": 8}, LoraFinetuningConfig),
        ({}, LoraFinetuningConfig),
        ('{"rank": 8}', LoraFinetuningConfig),
        ({"quantizer_name": "int8", "group_size": 32}, QATFinetuningConfig),
    ],
)
def test_an_algorithm_without_its_type_is_told_by_its_fields(algorithm: object, kind: type):
    body = translate_supervised_fine_tune({"job_uuid": "j", "algorithm_config": algorithm})
    assert isinstance(SupervisedFineTuneRequest.model_validate(body).algorithm_config, kind)


@pytest.mark.parametrize("algorithm", [None, "", "null"])
def test_an_algorithm_that_means_none_is_left_to_the_provider(algorithm: str | None):
    body = translate_supervised_fine_tune({"job_uuid": "j", "algorithm_config": algorithm})
    assert SupervisedFineTuneRequest.model_validate(body).algorithm_config is None


@pytest.mark.parametrize("field", ["training_config", "algorithm_config"])
@pytest.mark.parametrize("translate", [translate_supervised_fine_tune, translate_preference_optimize])
def test_a_string_that_is_not_json_is_refused_by_its_field(translate: Any, field: str):
    with pytest.raises(InvalidField) as caught:
        translate({field: "{n_epochs: 1}"})
    assert caught.value.param == field
    assert "n_epochs" not in caught.value.message


def test_preference_configs_may_be_json_strings():
    body = translate_preference_optimize({"job_uuid": "j", "algorithm_config": json.dumps({"beta": 0.2})})
    assert body == {"job_uuid": "j", "algorithm_config": {"beta": 0.2}}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"uri": "file:///a.csv"}, {"type": "uri", "uri": "file:///a.csv"}),
        ({"rows": [{"a": 1}]}, {"type": "rows", "rows": [{"a": 1}]}),
        ({"type": "rows", "rows": []}, {"type": "rows", "rows": []}),
        ({"other": 1}, {"other": 1}),
        ("text", "text"),
    ],
)
def test_a_source_without_its_type_is_told_by_its_key(source: object, expected: object):
    assert translate_dataset_registration({"source": source}) == {"source": expected}


def test_the_oldest_registration_becomes_a_uri_source():
    body = {
        "dataset_id": "d",
        "dataset_schema": {"dialog": {"type": "json"}},
        "url": {"uri": "data:text/csv;base64,YQ=="},
        "provider_id": None,
        "metadata": {},
    }
    request = RegisterDatasetRequest.model_validate(translate_dataset_registration(body))
    assert request.source == URIDataSource(uri="data:text/csv;base64,YQ==")
    assert request.dataset_id == "d"


@pytest.mark.parametrize("provider", ["localfs", "huggingface", "meta-reference", None])
def test_llama_stacks_own_providers_choose_nothing(provider: str | None):
    body = {"dataset_id": "d", "dataset_schema": {}, "url": {"uri": "a.csv"}, "provider_id": provider}
    request = RegisterDatasetRequest.model_validate(translate_provider(body))
    assert (request.source, request.metadata) == (URIDataSource(uri="a.csv"), None)


def test_another_provider_is_asked_for_in_the_metadata():
    body = {"source": {"uri": "a.csv"}, "provider_id": "lake", "metadata": {"a": 1}}
    assert translate_provider(body)["metadata"] == {"provider_id": "lake", "a": 1}


def test_the_hub_data_set_that_old_metadata_names_is_the_source():
    body = {
        "dataset_id": "d",
        "dataset_schema": {"question": {"type": "string"}},
        "url": {"uri": "https://huggingface.co/datasets/llamastack/evals"},
        "provider_id": "huggingface",
        "metadata": {"path": "llamastack/evals", "name": "evals__simpleqa", "split": "train"},
    }
    request = RegisterDatasetRequest.model_validate(translate_provider(body))
    uri = "huggingface://datasets/llamastack/evals?name=evals__simpleqa&split=train"
    assert request.source == URIDataSource(uri=uri)
    assert parse_hub_uri(uri) == ("llamastack/evals", {"name": "evals__simpleqa", "split": "train"})


def test_another_id_of_the_data_set_is_refused_and_its_own_is_not():
    body = {"dataset_id": "d", "url": {"uri": "a.csv"}, "provider_dataset_id": "d"}
    assert "provider_dataset_id" not in translate_dataset_registration(body)
    with pytest.raises(InvalidField) as caught:
        translate_dataset_registration(body | {"provider_dataset_id": "e"})
    assert caught.value.param == "provider_dataset_id"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"reward_scale": 0.3, "reward_clip": 5, "epsilon": 0.1, "gamma": 0.9}, {}),
        ({"beta": 0.2, "loss_type": "ipo"}, {"beta": 0.2, "loss_type": "ipo"}),
        ({}, {}),
        # Both shapes at once are no shape; the spec names what it does not know.
        ({"beta": 0.2, "gamma": 1}, {"beta": 0.2, "gamma": 1}),
    ],
)
def test_both_shapes_of_a_dpo_config_are_one(config: dict[str, Any], expected: dict[str, Any]):
    assert translate_preference_optimize({"algorithm_config": config}) == {"algorithm_config": expected}


def test_model_metadata_may_be_a_json_string():
    assert translate_model_registration({"metadata": '{"a": 1}'}) == {"metadata": {"a": 1}}
    assert translate_model_registration({"metadata": None}) == {"metadata": None}
    with pytest.raises(InvalidField):
        translate_model_registration({"metadata": "{"})


def test_every_version_translates_the_paths_it_has():
    paths = set(body_translations())
    assert {path.split("/", 2)[1] for path in paths} == {"alpha", "v1", "v1alpha", "v1beta"}
    assert "/v1/post-training/supervised-fine-tune" in paths
    assert "/v1alpha/post-training/preference-optimize" in paths
    assert "/v1beta/datasets" in paths
    assert "/alpha/datasets/register" in paths
