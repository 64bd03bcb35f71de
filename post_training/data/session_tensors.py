"""OpenTinker's serialised tensor batch, as rows of tokens.

`batch` holds tensors of shape [B, T]:

* `input_ids`: token ids; those that `attention_mask` leaves out are padding and never read.
* `attention_mask`: 0 or 1; the tokens of a row stand side by side, padded on the left, the right or both.
* `labels`: as transformers has them, the token itself or -100, not shifted; -100 at padding.
* or `loss_mask`: the loss weight of predicting the very token it stands at (not of what is predicted there, as in
  trainers that cut off its last column and not its first); 0 at padding. Without either, every token but a row's first
  has weight 1.
* `position_ids`: accepted where they count a row's tokens from 0, since that is what positions are here.

Whatever else would ask for something is refused by its name. `uid`, `index` and `data_source` of `non_tensor_batch`
tell rows apart and ask for nothing; they are accepted and not read, and so is each tensor's `__device__`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apis.common import MAX_INTEGER
from post_training.data.session_arrays import (
    DTYPES,
    IGNORED_LABEL,
    Place,
    as_integers,
    as_weights,
    check_ids,
    decode,
    weights_of_labels,
)
from post_training.data.types import TokenizedRow

PARAM = "batch_data"
_PARTS = ("batch", "non_tensor_batch", "meta_info")
_TENSORS = ("input_ids", "attention_mask", "labels", "loss_mask", "position_ids")
_REQUIRED = ("input_ids", "attention_mask")
_BOOKKEEPING = frozenset({"uid", "index", "data_source"})
_MAX_NAME = 100
_KINDS = ("torch.Tensor", "numpy.ndarray")
_KEYS = frozenset({"__type__", "__dtype__", "__shape__", "__data__", "__device__"})
_RL = "belongs to reinforcement learning, and a session fine-tunes on given answers: leave it out"
_INSTEAD: dict[str, str] = {
    "response_mask": "covers the response alone, [B, response_length], and does not say where in input_ids that "
    "stands: send loss_mask or labels of input_ids' shape",
    "prompts": "is a part of input_ids already: leave it out",
    "responses": "is a part of input_ids already: leave it out, and mark it in loss_mask or labels",
} | dict.fromkeys(
    (
        *("old_log_probs", "ref_log_prob", "rollout_log_probs", "advantages", "returns", "values"),
        *("token_level_scores", "token_level_rewards", "rm_scores"),
    ),
    _RL,
)


@dataclass(frozen=True)
class _Tensors:
    """The decoded tensors of a batch, each [B, T]."""

    input_ids: NDArray[np.int64]
    attended: NDArray[np.bool_]
    others: Mapping[str, NDArray[Any]]


def rows_of_tensors(batch_data: Mapping[str, Any], vocab_size: int) -> list[TokenizedRow]:
    """The rows of a batch, in order, without their padding.

    Raises:
        DataInvalid: naming the tensor and, where there is one, the row.
    """
    tensors = _read(batch_data)
    begins, ends = _spans(tensors.attended)
    check_ids(np.where(tensors.attended, tensors.input_ids, 0), vocab_size, _place("input_ids"))
    _check_positions(tensors, begins)
    weights = _weights(tensors)
    weights[np.arange(len(begins)), begins] = 0  # nothing precedes a row's first token
    tokens = tensors.input_ids.astype(np.int32)
    spans = zip(begins.tolist(), ends.tolist(), strict=True)
    return [TokenizedRow(row, tokens[row, a:b], weights[row, a:b]) for row, (a, b) in enumerate(spans)]


def _read(batch_data: Mapping[str, Any]) -> _Tensors:
    for name in batch_data:
        if name not in _PARTS:
            raise Place(f"{PARAM}.{_shown(name)}").refuse(f"there is no such field; there are {', '.join(_PARTS)}")
    _refuse_extras(batch_data)
    batch = batch_data.get("batch")
    if not isinstance(batch, dict):
        raise Place(f"{PARAM}.batch").refuse("must be an object of tensors by name")
    _check_names(batch)
    decoded = {name: _tensor(value, _place(name)) for name, value in batch.items()}
    ids = as_integers(decoded["input_ids"], _place("input_ids"))
    for name, values in decoded.items():
        if values.shape != ids.shape:
            raise _place(name).refuse(f"has shape {list(values.shape)}, but input_ids has {list(ids.shape)}")
    return _Tensors(ids, _attended(decoded["attention_mask"]), decoded)


def _refuse_extras(batch_data: Mapping[str, Any]) -> None:
    for part, accepted in (("non_tensor_batch", _BOOKKEEPING), ("meta_info", frozenset[str]())):
        extras = batch_data.get(part) or {}
        if not isinstance(extras, dict):
            raise Place(f"{PARAM}.{part}").refuse("must be an object")
        for name in extras:
            if name not in accepted:
                raise Place(f"{PARAM}.{part}.{_shown(name)}").refuse("has no effect on fine-tuning: leave it out")


def _check_names(batch: Mapping[str, Any]) -> None:
    for name in batch:
        if name not in _TENSORS:
            why = _INSTEAD.get(name, f"there is no such tensor here; there are {', '.join(_TENSORS)}")
            raise _place(name).refuse(why)
    for name in _REQUIRED:
        if name not in batch:
            ones = "; send ones where no row is padded" if name == "attention_mask" else ""
            raise _place(name).refuse(f"is missing{ones}")
    if "labels" in batch and "loss_mask" in batch:
        raise _place("loss_mask").refuse("give labels or loss_mask, not both")


def _tensor(value: Any, place: Place) -> NDArray[Any]:
    """[B, T], at least one row of at least two tokens."""
    if not isinstance(value, dict):
        raise place.refuse("must be a tensor: {__type__, __dtype__, __shape__, __data__}")
    for key in value:
        if key not in _KEYS:
            raise place.refuse(f"a tensor has no field {_shown(key)!r}; it has {', '.join(sorted(_KEYS))}")
    if value.get("__type__") not in _KINDS:
        raise place.refuse(f"__type__ must be one of {', '.join(_KINDS)}")
    dtype = str(value.get("__dtype__")).removeprefix("torch.")
    if dtype not in DTYPES:
        raise place.refuse(f"__dtype__ must be one of {', '.join(DTYPES)}, as 'torch.int64' or 'int64'")
    data = value.get("__data__")
    if not isinstance(data, str):
        raise place.refuse("__data__ must be a string, the numbers in base64")
    return decode(data, dtype, _shape(value.get("__shape__"), place), place)


def _shape(shape: Any, place: Place) -> list[int]:
    numbers = isinstance(shape, list) and all(type(size) is int and size <= MAX_INTEGER for size in shape)
    if not numbers or len(shape) != 2 or shape[0] < 1 or shape[1] < 2:
        raise place.refuse("__shape__ must be [B, T], with at least one row and two tokens")
    return shape


def _attended(mask: NDArray[Any]) -> NDArray[np.bool_]:
    attended = mask == 1
    wrong = ~attended & (mask != 0)
    if wrong.any():
        row, position = (int(index) for index in np.argwhere(wrong)[0])
        message = f"is {mask[row, position]} at position {position}, and must be 0 or 1"
        raise _place("attention_mask").refuse(message, row)
    return attended


def _spans(attended: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[B] and [B], where each row's tokens begin and end."""
    place = _place("attention_mask")
    counts = attended.sum(axis=1)
    begins, ends = attended.argmax(axis=1), attended.shape[1] - attended[:, ::-1].argmax(axis=1)
    if (counts < 2).any():
        row = int((counts < 2).argmax())
        raise place.refuse(
            f"leaves {counts[row]} tokens of the row, and one to learn from and one to learn are two", row
        )
    torn = counts != ends - begins
    if torn.any():
        raise place.refuse("has a 0 between the row's tokens: pad on the left or the right", int(torn.argmax()))
    return begins, ends


def _check_positions(tensors: _Tensors, begins: NDArray[np.int64]) -> None:
    if (given := tensors.others.get("position_ids")) is None:
        return
    place = _place("position_ids")
    counted = np.arange(given.shape[1]) - begins[:, np.newaxis]
    wrong = tensors.attended & (as_integers(given, place) != counted)
    if wrong.any():
        row, position = (int(index) for index in np.argwhere(wrong)[0])
        raise place.refuse(
            f"is {given[row, position]} at position {position}, where the row's token number {counted[row, position]} "
            "(from 0) stands: positions count a row's tokens, or may be left out",
            row,
        )


def _weights(tensors: _Tensors) -> NDArray[np.float32]:
    """[B, T] loss weights of predicting each token, 0 at padding."""
    labels, mask = tensors.others.get("labels"), tensors.others.get("loss_mask")
    if labels is not None:
        place = _place("labels")
        whole = as_integers(labels, place)
        _refuse_at_padding(whole != IGNORED_LABEL, tensors, place, f"must be {IGNORED_LABEL}")
        return weights_of_labels(whole, tensors.input_ids, place)
    if mask is not None:
        place = _place("loss_mask")
        weights = as_weights(mask, place)
        _refuse_at_padding(weights != 0, tensors, place, "must be 0")
        return weights
    return tensors.attended.astype(np.float32)


def _refuse_at_padding(acts: NDArray[np.bool_], tensors: _Tensors, place: Place, rule: str) -> None:
    wrong = acts & ~tensors.attended
    if wrong.any():
        row, position = (int(index) for index in np.argwhere(wrong)[0])
        raise place.refuse(f"{rule} at position {position}, which is padding by attention_mask", row)


def _place(tensor: str) -> Place:
    return Place(f"{PARAM}.batch.{_shown(tensor)}")


def _shown(name: str) -> str:
    """A name as an answer can hold it."""
    return name[:_MAX_NAME].encode("utf-8", "backslashreplace").decode()
