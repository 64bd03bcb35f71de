"""The client's compact arrays: read back by torch, they are the numbers that were given."""

from __future__ import annotations

import base64
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apis.errors import InvalidField
from apis.sft_sessions.training_models import Batch
from post_training.client.sft_arrays import encode_tokens, encode_weights
from post_training.data.chat import ChatTokenizer
from post_training.data.session_batches import BatchReader
from tests.tiny_llama import save_tiny_llama


@given(st.lists(st.integers(-100, 398) | st.integers(-(2**63), 2**63 - 1), max_size=30))
def test_encoded_tokens_are_read_back_by_torch(values: list[int]):
    sent = encode_tokens(values)
    dtype = getattr(torch, sent["dtype"])
    data = bytearray(base64.b64decode(sent["data"]))
    assert sent["shape"] == [len(values)]
    assert (torch.frombuffer(data, dtype=dtype).tolist() if values else []) == values


@given(st.lists(st.floats(width=16, allow_nan=False, allow_infinity=False) | st.sampled_from([0.0, 1.0]), max_size=30))
def test_encoded_weights_are_read_back_by_torch_and_lose_nothing(values: list[float]):
    sent = encode_weights(values)
    exact = torch.tensor(values).to(torch.bfloat16).tolist() == values
    assert sent["dtype"] == ("bfloat16" if exact else "float32")
    data = bytearray(base64.b64decode(sent["data"]))
    found = torch.frombuffer(data, dtype=getattr(torch, sent["dtype"])).tolist() if values else []
    assert found == values


def test_arrays_and_tensors_are_encoded_as_lists_are_and_read_by_a_session(tmp_path: Path):
    reader = BatchReader(
        ChatTokenizer.from_dir(save_tiny_llama(tmp_path / "tiny")),
        data_format=None,
        columns=None,
        train_on_input=False,
        max_seq_len=64,
        on_overlength="error",
        vocab_size=399,
    )
    tokens, labels, weights = [5, 6, 7], [-100, 6, 7], [0.0, 1.0, 0.1]
    for make in (np.array, torch.tensor):
        assert encode_tokens(make(tokens)) == encode_tokens(tokens)
        assert encode_weights(make(weights)) == encode_weights(weights)
        sent = [
            {"tokens": encode_tokens(make(tokens)), "labels": encode_tokens(make(labels))},
            {"tokens": encode_tokens(list(make(tokens))), "weights": encode_weights(make(weights))},
        ]
        rows = reader.read(Batch.model_validate({"sequences": sent}))
        assert [row.tokens.tolist() for row in rows] == [tokens, tokens]
        assert [row.weights.tolist() for row in rows] == [[0, 1, 1], [0, 1, np.float32(0.1)]]
    assert encode_weights(torch.tensor([0, 0.5]).bfloat16())["dtype"] == "bfloat16"


def test_what_is_no_token_or_weight_is_not_encoded():
    for values in ([1.5], [True], ["5"], [2**63], [[1, 2]]):
        with pytest.raises(InvalidField, match=r"whole numbers|64 bits"):
            encode_tokens(values)
    for values in (["a"], [None], [math.nan], [1e39]):
        with pytest.raises(InvalidField, match="weights are"):
            encode_weights(values)
