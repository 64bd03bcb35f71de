"""One save of a real job, tried as often as wanted.

    python -m tests.faults.one_save HOME BASE inside|merged

runs under LD_PRELOAD with failing_writes.so: it lets the n-th write of the save fail, for every n, and prints what came
of each as JSON lines.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from apis.post_training.models import JobProgress, PostTrainingMetric
from post_training.checkpoints.layout import TRAINING_STATE, check_files
from post_training.checkpoints.space import CheckpointSize
from post_training.checkpoints.state import load_training_state, rng_tensors
from post_training.data.batching import flatten
from post_training.data.job_rows import tokenize
from post_training.training.optim import OptimSettings
from post_training.training.trainer import Trainer
from post_training.worker import setup
from post_training.worker.announcing import Announcer
from post_training.worker.keeping import clean
from post_training.worker.lease import Lease
from post_training.worker.resume import Cursor
from post_training.worker.saving import Saver, Snapshot, write_checkpoint
from tests.job_bench import Bench, rows


class OneSave:
    """A claimed job with the checkpoint of step 1 behind it and that of step 2 to be saved.

    Args:
        merged: save as after an epoch, with the merged model.
    """

    def __init__(self, home: Path, base: Path, *, merged: bool) -> None:
        self.bench = Bench(home, base, model_module="providers.torchtune.model", export=("adapter", "merged"))
        self._spec = self.bench.submit("saved", rows(2), save_total_limit=5)
        claim = self.bench.claim()
        self._lease = Lease(self.bench.store, claim.job_uuid, claim.owner)
        assert self._spec.dataset is not None
        data = tokenize(self._spec, self._spec.dataset).rows
        self._trainer = Trainer(setup.load_model(self._spec, "cpu"), OptimSettings(3, lr=1e-2))
        announcer = Announcer(self._lease, self._spec, home)
        self._saver = Saver(self._lease, self._spec, home, CheckpointSize(0, 0), announcer, lambda _: 0)
        self._merged = merged
        self._trainer.train_step([flatten(data)])
        self._saver.save_inside(self._snapshot())
        self._trainer.train_step([flatten(data)])

    @property
    def root(self) -> Path:
        return self.bench.root("saved")

    def __call__(self) -> str:
        """Try once, then check that the checkpoint before is whole, known and alone.

        Returns:
            `saved`, or the name of the error's class.
        """
        self._lease.confirm()
        try:
            outcome = self._try()
        except Exception as error:
            outcome = type(error).__name__
        return outcome

    def check_earlier(self) -> list[str]:
        """What lies there after the clean-up at an attempt's end; raises where the earlier checkpoint is not whole."""
        clean(self._lease, self.bench.home)
        check_files(self.root / "1")
        tensors, meta = load_training_state(self.root / "1" / TRAINING_STATE)
        assert meta["step"] == 1
        assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
        assert self.bench.folders("saved") == [str(step) for step in self.bench.steps("saved")]
        return self.bench.folders("saved")

    def _try(self) -> str:
        if self._merged:
            metric = PostTrainingMetric(epoch=0, train_loss=1.0)
            write_checkpoint(self._spec, self.bench.home, replace(self._snapshot(), metric=metric), True)
        else:
            self._saver.save_inside(self._snapshot())
        return "saved"

    def _snapshot(self) -> Snapshot:
        return Snapshot.of_job(self._trainer, 0, Cursor(), JobProgress(), rng_tensors())


def main(home: str, base: str, form: str) -> None:
    torch.set_num_threads(1)
    shim = ctypes.CDLL(None)
    save = OneSave(Path(home), Path(base), merged=form == "merged")
    under = str(save.root).encode()
    for n in itertools.count(1):
        shim.arm(under, ctypes.c_long(n))
        outcome = save()
        calls = shim.counted()
        shim.arm(b"", ctypes.c_long(0))
        if outcome == "saved":
            check_files(save.root / "2")
        print(json.dumps({"n": n, "calls": calls, "outcome": outcome, "left": save.check_earlier()}), flush=True)
        if outcome == "saved":
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
