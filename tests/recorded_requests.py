"""What real clients were recorded to send: each ran unmodified against a server on loopback that wrote it down."""

from __future__ import annotations

from typing import Any

ADAPTER = {
    "type": "LoRA",
    "lora_attn_modules": ["q_proj", "v_proj"],
    "apply_lora_to_mlp": True,
    "apply_lora_to_output": False,
    "rank": 8,
    "alpha": 16,
}
FINE_TUNE_0_0_61: dict[str, Any] = {
    "algorithm": "lora",
    "algorithm_config": {name: value for name, value in ADAPTER.items() if name != "type"},
    "dataset_id": "d",
    "hyperparam_search_config": {},
    "job_uuid": "1234",
    "logger_config": {},
    "model": "m",
    "optimizer_config": {"optimizer_type": "adamw", "lr": 0.0003, "lr_min": 0.0, "weight_decay": 0.1},
    "training_config": {
        "n_epochs": 1,
        "batch_size": 2,
        "shuffle": True,
        "n_iters": 10,
        "enable_activation_checkpointing": False,
        "memory_efficient_fsdp_wrap": False,
        "fsdp_cpu_offload": False,
    },
    "validation_dataset_id": "v",
}
FINE_TUNE_0_0_63: dict[str, Any] = {
    "hyperparam_search_config": {},
    "job_uuid": "1234",
    "logger_config": {},
    "model": "m",
    "training_config": {
        "n_epochs": 1,
        "max_steps_per_epoch": 10,
        "gradient_accumulation_steps": 1,
        "data_config": {"dataset_id": "d", "batch_size": 2, "shuffle": True, "validation_dataset_id": "v"},
        "optimizer_config": {"optimizer_type": "adamw", "lr": 0.0003, "weight_decay": 0.1},
    },
    "algorithm_config": ADAPTER,
    "checkpoint_dir": "null",
}
# 0.1.0, 0.1.9, 0.2.7, 0.2.12, 0.2.23 at /v1 and 0.3.5, 0.4.0, 0.7.0 at /v1alpha send the same fields.
FINE_TUNE_SDK: dict[str, Any] = FINE_TUNE_0_0_63
FINE_TUNE_CLI: dict[str, Any] = {
    "hyperparam_search_config": {},
    "job_uuid": "1234",
    "logger_config": {},
    "training_config": (
        '{"n_epochs": 1, "max_steps_per_epoch": 10, "gradient_accumulation_steps": 1, "data_config":'
        ' {"dataset_id": "d", "batch_size": 2, "shuffle": true, "validation_dataset_id": "v"}, "optimizer_config":'
        ' {"optimizer_type": "adamw", "lr": 0.0003, "weight_decay": 0.1}}'
    ),
    "algorithm_config": (
        '{"type": "LoRA", "lora_attn_modules": ["q_proj", "v_proj"], "apply_lora_to_mlp": true,'
        ' "apply_lora_to_output": false, "rank": 8, "alpha": 16}'
    ),
    "checkpoint_dir": None,
    "model": "m",
}
FINE_TUNES: dict[str, tuple[str, dict[str, Any]]] = {
    "0.0.61": ("/alpha", FINE_TUNE_0_0_61),
    "0.0.63": ("/alpha", FINE_TUNE_0_0_63),
    "0.1.0 to 0.2.23": ("/v1", FINE_TUNE_SDK),
    "command line 0.1.0 to 0.2.23": ("/v1", FINE_TUNE_CLI),
    "0.3.5 to 0.7.0": ("/v1alpha", FINE_TUNE_SDK),
}

PREFERENCE_0_1_0: dict[str, Any] = {
    "algorithm_config": {"reward_scale": 0.1, "reward_clip": 5.0, "epsilon": 0.1, "gamma": 0.99},
    "finetuned_model": "m",
    "hyperparam_search_config": {},
    "job_uuid": "1234",
    "logger_config": {},
    "training_config": FINE_TUNE_SDK["training_config"],
}
PREFERENCE_0_2_23 = PREFERENCE_0_1_0 | {"algorithm_config": {"beta": 0.1, "loss_type": "sigmoid"}}
PREFERENCE_0_0_61: dict[str, Any] = {
    "algorithm": "dpo",
    "algorithm_config": PREFERENCE_0_1_0["algorithm_config"],
    "finetuned_model": "m",
} | {
    name: FINE_TUNE_0_0_61[name]
    for name in (
        "dataset_id",
        "validation_dataset_id",
        "optimizer_config",
        "training_config",
        "job_uuid",
        "hyperparam_search_config",
        "logger_config",
    )
}
PREFERENCES: dict[str, tuple[str, dict[str, Any]]] = {
    "0.0.61": ("/alpha", PREFERENCE_0_0_61),
    "0.0.63": ("/alpha", PREFERENCE_0_1_0),
    "0.1.0 to 0.2.12": ("/v1", PREFERENCE_0_1_0),
    "0.2.23": ("/v1", PREFERENCE_0_2_23),
    "0.3.5 to 0.7.0": ("/v1alpha", PREFERENCE_0_2_23),
}

CSV = "data:text/csv;base64,cHJvbXB0LGNvbXBsZXRpb24KYSxiCmMsZAplLGYK"
"""prompt,completion and the rows a,b; c,d; e,f."""
DATASETS: dict[str, tuple[str, dict[str, Any]]] = {
    "0.0.61": (
        "/alpha/datasets/register",
        {"dataset_id": "a/b", "dataset_schema": {"dialog": {"type": "json"}}, "url": CSV, "provider_id": "localfs"},
    ),
    "0.0.63": (
        "/alpha/datasets/register",
        {
            "dataset_id": "a/b",
            "dataset_schema": {"dialog": {"type": "json"}},
            "url": {"uri": CSV},
            "provider_id": "localfs",
        },
    ),
    "0.1.0": (
        "/v1/datasets",
        {
            "dataset_id": "a/b",
            "dataset_schema": {"dialog": {"type": "json"}},
            "url": {"uri": CSV},
            "provider_id": "localfs",
        },
    ),
    "command line 0.1.0": (
        "/v1/datasets",
        {
            "dataset_id": "a/b",
            "dataset_schema": {"prompt": {"type": "string"}},
            "url": {"uri": CSV.replace("text/csv", "None")},
            "metadata": None,
            "provider_dataset_id": None,
            "provider_id": None,
        },
    ),
    "0.1.9 to 0.2.23": (
        "/v1/datasets",
        {
            "purpose": "post-training/messages",
            "source": {"type": "uri", "uri": CSV},
            "dataset_id": "a/b",
            "metadata": {},
        },
    ),
    "command line 0.2.7": (
        "/v1/datasets",
        {"purpose": "post-training/messages", "source": {"uri": CSV}, "dataset_id": "a/b", "metadata": None},
    ),
    "0.3.5 to 0.7.0": (
        "/v1beta/datasets",
        {
            "purpose": "post-training/messages",
            "source": {"type": "uri", "uri": CSV},
            "dataset_id": "a/b",
            "metadata": {},
        },
    ),
}

# Every other call of the SDKs' resources that are served here: version, method, path, body.
CALLS: list[tuple[str, str, str, dict[str, Any] | None]] = [
    ("0.0.61", "GET", "/alpha/health", None),
    ("0.0.61", "GET", "/alpha/providers/list", None),
    ("0.0.61", "GET", "/alpha/routes/list", None),
    ("0.0.61", "GET", "/alpha/models/list", None),
    ("0.0.61", "GET", "/alpha/models/get?identifier=acme%2Ftiny", None),
    ("0.0.61", "POST", "/alpha/models/register", {"model_id": "alpha/x", "provider_model_id": "acme/tiny"}),
    ("0.0.61", "POST", "/alpha/models/unregister", {"model_id": "alpha/x"}),
    ("0.1.0", "GET", "/v1/health", None),
    ("0.1.0", "GET", "/v1/version", None),
    ("0.1.0", "GET", "/v1/inspect/providers", None),
    ("0.1.0", "GET", "/v1/inspect/routes", None),
    ("0.1.0", "GET", "/v1/models", None),
    ("0.1.0", "GET", "/v1/models/acme/tiny", None),
    ("0.1.0", "POST", "/v1/models", {"model_id": "v1/x", "provider_model_id": "acme/tiny"}),
    (
        "command line 0.1.0",
        "POST",
        "/v1/models",
        {
            "model_id": "v1/y",
            "metadata": '{"size": 1}',
            "model_type": "llm",
            "provider_id": None,
            "provider_model_id": "acme/tiny",
        },
    ),
    ("0.1.0", "DELETE", "/v1/models/v1/x", None),
    ("0.1.9", "GET", "/v1/providers", None),
    ("0.1.9", "GET", "/v1/providers/localfs", None),
    ("0.2.23", "GET", "/v1/openai/v1/models", None),
    ("0.4.0", "GET", "/v1alpha/admin/health", None),
    ("0.4.0", "GET", "/v1alpha/admin/version", None),
    ("0.4.0", "GET", "/v1alpha/admin/providers", None),
    ("0.4.0", "GET", "/v1alpha/admin/providers/localfs", None),
    ("0.4.0", "GET", "/v1alpha/admin/inspect/routes", None),
    ("command line 0.1.0", "GET", "/v1/shields", None),
    ("command line 0.1.0", "GET", "/v1/toolgroups", None),
    ("command line 0.1.0", "GET", "/v1/tools", None),
    ("command line 0.1.0", "GET", "/v1/vector-dbs", None),
    ("command line 0.1.0", "GET", "/v1/scoring-functions", None),
    ("command line 0.1.0", "GET", "/v1/eval-tasks", None),
    ("command line 0.2.23", "GET", "/v1/eval/benchmarks", None),
]
