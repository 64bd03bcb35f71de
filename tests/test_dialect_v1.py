"""Bodies of old clients, put into the words of the typed spec. Inputs are what real clients were seen to send."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from apis.datasets.models import RegisterDatasetRequest, URIDataSource
from apis.errors import InvalidField
from apis.post_training.models import LoraFinetuningConfig, QATFinetuningConfig, SupervisedFineTuneRequest
from distributions.dialects.llama_stack_v1 import (
    body_translations,
    translate_dataset_registration,
    translate_preference_optimize,
    translate_supervised_fine_tune,
)

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


def test_every_version_translates_the_same_paths():
    paths = set(body_translations())
    assert {path.split("/", 2)[1] for path in paths} == {"v1", "v1alpha", "v1beta"}
    assert "/v1/post-training/supervised-fine-tune" in paths
    assert "/v1alpha/post-training/preference-optimize" in paths
    assert "/v1beta/datasets" in paths
