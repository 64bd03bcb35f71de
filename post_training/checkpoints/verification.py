"""Having checkpoints verified (`verify.py`) by a process apart from the trainer. No torch here.

Its cost to training, SmolLM2-135M on two cores: what a process needs to import (some 5 s of a core) is paid once,
ahead; each verification takes about 4 s of one core, which it gets where training leaves it one (`NICE`).
"""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from apis.errors import CheckpointUnverified
from post_training.catalog.model_files import tensor_headers
from post_training.checkpoints.child import Child
from post_training.processes import available_memory

FP32_BOUND = 1e-5
BF16_BOUND = 3e-2
NICE = 10
"""Training's threads wait for each other in each layer, so a core that is taken from one of them is lost to all."""
_SECONDS = 1800.0
_FP32_BYTES = 4
# A process with PyTorch, PEFT and transformers, and the logits of a probe.
_RUNTIME_BYTES = 800 * 2**20


class VerifyReport(BaseModel):
    """What was measured. Differences are relative Frobenius norms of logits.

    Attributes:
        adapter_error: base + adapter in PEFT against the trainer; None where every weight was trained.
        merged_error: the merged model against the trainer; of the saved one, else of PEFT's own fp32 merge in memory.
        merged_dtype: how the merged model is saved, None where there is none.
        change: base + adapter against the base alone: what training changed.
        tokens: length of the probe.
        quantization_change: the adapter on the quantized base it was trained against, to the same on the stored base;
            None where the base was not quantized.
    """

    adapter_error: float | None
    merged_error: float
    merged_dtype: str | None
    change: float
    tokens: int
    quantization_change: float | None = None


class Verifier:
    """Verifies the checkpoints of one job, one at a time, in a process that is kept between them.

    Args:
        model_module: module with `load_model(ModelConfig) -> TrainableModel`.
        lora_config: the fields of LoraSettings the checkpoints were trained with.
        full: whether every weight was trained, so that checkpoints hold a whole model and no adapter.
    """

    def __init__(self, base_dir: Path, model_module: str, lora_config: dict[str, Any], *, full: bool = False) -> None:
        self._base_dir = base_dir
        self._request = {"base_dir": str(base_dir), "model_module": model_module, "lora": lora_config, "full": full}
        self._child: Child | None = None
        self._thread: threading.Thread | None = None

    def prepare(self) -> None:
        """Start the process, if it is not there, so that it has imported what it needs when it is asked.

        Raises:
            OSError: the system has no room for another process.
        """
        if self._child is not None and not self._child.alive:
            # It ended while it had nothing to do, which says nothing about any checkpoint.
            self._child.kill()
            self._child = None
        if self._child is None:
            self._child = Child(
                "post_training.checkpoints.verify",
                what="the verification of the checkpoint",
                failure=CheckpointUnverified,
                nice=NICE,
            )

    def begin(self, checkpoint_dir: Path, threads: int, timeout: float = _SECONDS) -> Future[VerifyReport]:
        """Verify a committed checkpoint, which is not changed; the one before must have ended.

        Args:
            threads: CPU threads to verify with.

        Returns:
            the report, or one of

            CheckpointUnverified: with the numbers, where the artifacts do not compute what the trainer computed,
                training changed nothing, a value is not finite, or verification could not end.
            OutOfMemory: the process was killed by the system.
        """
        self.prepare()
        outcome: Future[VerifyReport] = Future()
        request = {**self._request, "checkpoint_dir": str(checkpoint_dir), "threads": threads}
        self._thread = threading.Thread(target=self._ask, args=(request, timeout, outcome), daemon=True)
        self._thread.start()
        return outcome

    def rest(self) -> None:
        """End the process, which has nothing to do, for its memory. It is started again when it is needed."""
        if self._thread is not None:
            self._thread.join()
        if self._child is not None:
            self._child.close()
            self._child = None

    def close(self) -> None:
        """End the process at once, whatever it does."""
        if self._child is not None:
            self._child.kill()
            self._child = None
        if self._thread is not None:
            self._thread.join()

    @property
    def started(self) -> bool:
        return self._child is not None

    def fits_beside_training(self) -> bool:
        """Whether a verification finds its memory while the trainer holds its own. True where nobody can tell.

        It holds the base once, in fp32.
        """
        free = available_memory()
        if free is None:
            return True
        weights = sum(math.prod(header.shape) for header in tensor_headers(self._base_dir).values())
        return free > weights * _FP32_BYTES * 1.25 + _RUNTIME_BYTES

    def _ask(self, request: dict[str, Any], timeout: float, outcome: Future[VerifyReport]) -> None:
        assert self._child is not None
        child = self._child
        try:
            outcome.set_result(VerifyReport.model_validate(child.ask(request, timeout)))
        except BaseException as error:
            outcome.set_exception(error)


def verify_checkpoint(
    checkpoint_dir: Path,
    base_dir: Path,
    model_module: str,
    lora_config: dict[str, Any],
    threads: int = 1,
    timeout: float = _SECONDS,
) -> VerifyReport:
    """Verify one committed checkpoint in a process of its own. Args and errors: as `Verifier`."""
    verifier = Verifier(base_dir, model_module, lora_config)
    try:
        return verifier.begin(checkpoint_dir, threads, timeout).result()
    finally:
        verifier.close()
