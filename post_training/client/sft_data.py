"""Rows of a caller's as numbered batches: computed from the number where rows can be picked, buffered where not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Protocol

from apis.errors import DataInvalid, InvalidField
from post_training.client.sft_rows import Row, Rows, encoded, pick, row_source

# Of more rows than these an evenly spread part is hashed, so that a fit of millions begins at once.
MAX_HASHED_ROWS = 20_000
_DIGEST_CHARACTERS = 32


@dataclass(frozen=True)
class Part:
    """The rows of one step.

    Attributes:
        numbers: of each row, in the data.
        epoch: from 0.
        position: rows of the epoch that are used up after this step.
        data: what tells these data from others: of all rows, or of the epoch's rows so far.
    """

    rows: list[Row]
    numbers: Sequence[int]
    epoch: int
    position: int
    data: str


class Batches(Protocol):
    """Numbered batches, from 0 or from where `seek` went.

    Attributes:
        total: how many there are; None where that is not known yet.
    """

    @property
    def total(self) -> int | None: ...

    def part(self, number: int) -> Part | None:
        """Batch `number`; None after the last. Raises DataInvalid at a row that cannot be sent."""
        ...

    def forget(self, below: int) -> None:
        """Batches before `below` will not be asked for again."""
        ...

    def seek(self, number: int, epoch: int, position: int, data: str) -> None:
        """Make `number` the first batch, after that one whose `Part` said the rest.

        Raises:
            DataInvalid: these are other data than those.
        """
        ...


def open_batches(data: Rows, batch_size: int, *, epochs: int | None, shuffle: bool, seed: int) -> Batches:
    """The batches of a fit.

    Args:
        epochs: passes over the data; None for as many as are asked for.
        shuffle: each epoch in an order of its own, drawn from the seed as a whole job draws it.

    Raises:
        DataInvalid: there are no rows, or they are no rows.
        FileMissing: there is no such file.
        InvalidField: `shuffle`, or more than one epoch, of rows that come only one after the other.
    """
    rows = row_source(data)
    if isinstance(rows, Sequence):
        return IndexedBatches(rows, batch_size, epochs=epochs, shuffle=shuffle, seed=seed)
    if shuffle:
        raise InvalidField(
            "rows that come one after the other cannot be shuffled: pass a list or a file", param="shuffle"
        )
    return StreamBatches(rows, batch_size, epochs=epochs)


class IndexedBatches:
    """Batches of rows that can be picked by their number; a batch follows from its number alone."""

    def __init__(
        self, rows: Sequence[Any], batch_size: int, *, epochs: int | None, shuffle: bool = False, seed: int = 0
    ) -> None:
        if len(rows) == 0:
            raise DataInvalid("there are no rows; training needs at least one")
        self._rows, self._size = rows, batch_size
        self._shuffle, self._seed = shuffle, seed
        self._per_epoch = -(-len(rows) // batch_size)
        self._order: tuple[int, Sequence[int]] = (-1, ())
        self.total = None if epochs is None else epochs * self._per_epoch
        self._digest: str | None = None

    def part(self, number: int) -> Part | None:
        if self.total is not None and number >= self.total:
            return None
        epoch, index = divmod(number, self._per_epoch)
        if self._order[0] != epoch:
            self._order = (epoch, self._shuffled(epoch) if self._shuffle else range(len(self._rows)))
        begin = index * self._size
        numbers = list(self._order[1][begin : begin + self._size])
        rows = [encoded(row, n)[0] for row, n in zip(pick(self._rows, numbers), numbers, strict=True)]
        return Part(rows, numbers, epoch, begin + len(rows), self.digest())

    def _shuffled(self, epoch: int) -> list[int]:
        # Only here, since numpy takes longer to import than the rest of the client.
        from post_training.data.batching import epoch_order

        return epoch_order(len(self._rows), True, self._seed, epoch).tolist()

    def forget(self, below: int) -> None:
        """Nothing is kept."""

    def seek(self, number: int, epoch: int, position: int, data: str) -> None:
        if data != self.digest():
            raise other_data()

    def digest(self) -> str:
        """A hash of the rows, of `MAX_HASHED_ROWS` at most."""
        if self._digest is None:
            total = len(self._rows)
            step = -(-total // MAX_HASHED_ROWS)
            digest = hashlib.sha256(f"{total} rows\n".encode())
            for begin in range(0, total, 256 * step):
                numbers = list(range(begin, min(total, begin + 256 * step), step))
                for row, n in zip(pick(self._rows, numbers), numbers, strict=True):
                    digest.update(encoded(row, n)[1])
            self._digest = digest.hexdigest()[:_DIGEST_CHARACTERS]
        return self._digest


class StreamBatches:
    """Batches of rows that come one after the other; they are kept until they are forgotten."""

    def __init__(
        self, rows: Iterable[Any] | Callable[[], Iterable[Any]], batch_size: int, *, epochs: int | None
    ) -> None:
        self._source, self._size = rows, batch_size
        self._again = not isinstance(rows, Iterator)
        if not self._again and epochs is not None and epochs > 1:
            raise InvalidField(
                "an iterator gives its rows once: for more epochs pass a list, a file, or a function that gives a new "
                "one",
                param="epochs",
            )
        self._epochs = epochs if self._again else 1
        self._kept: dict[int, Part] = {}
        self._next = 0
        self.total: int | None = None
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        source = self._source if isinstance(self._source, Iterable) else self._source()
        self._rows, self._epoch, self._position = iter(source), epoch, 0
        self._digest = hashlib.sha256()

    def part(self, number: int) -> Part | None:
        if number < self._next and number not in self._kept:
            self._go_back(number)
        while number >= self._next:
            part = self._read()
            if part is None:
                self.total = self._next
                return None
            self._kept[self._next] = part
            self._next += 1
        return self._kept[number]

    def _go_back(self, number: int) -> None:
        """Read from the beginning again, up to before a batch that was forgotten: the server's checkpoint was lost."""
        if not self._again:
            raise DataInvalid(
                f"step {number + 1} of the fit is to be sent again, for the session went back to before it, and the "
                "iterator has given its rows: resume the session with the same rows from their beginning"
            )
        self._kept.clear()
        self._next = 0
        self._begin(0)
        while self._next < number and self._read() is not None:
            self._next += 1

    def _read(self) -> Part | None:
        rows = self._take(self._size)
        if not rows and self._position == 0:
            raise DataInvalid("there are no rows; training needs at least one")
        if not rows:
            if self._epochs is not None and self._epoch + 1 >= self._epochs:
                return None
            self._begin(self._epoch + 1)
            return self._read()
        numbers = range(self._position - len(rows), self._position)
        return Part(rows, numbers, self._epoch, self._position, self._hash())

    def _take(self, most: int) -> list[Row]:
        rows: list[Row] = []
        for row in islice(self._rows, most):
            plain, line = encoded(row, self._position)
            rows.append(plain)
            self._digest.update(line)
            self._position += 1
        return rows

    def _hash(self) -> str:
        return self._digest.hexdigest()[:_DIGEST_CHARACTERS]

    def forget(self, below: int) -> None:
        for number in [known for known in self._kept if known < below]:
            del self._kept[number]

    def seek(self, number: int, epoch: int, position: int, data: str) -> None:
        if epoch != self._epoch:
            self._begin(epoch)
        while self._position < position and self._take(min(256, position - self._position)):
            pass
        if self._position != position or self._hash() != data:
            raise other_data()
        self._next = number


def other_data() -> DataInvalid:
    return DataInvalid(
        "these are not the rows that the session was trained on so far: give the same rows, from their beginning and "
        "in the same order, or submit a new session"
    )


def validation_parts(data: Rows, batch_size: int) -> Callable[[], Iterator[Part]]:
    """A function that gives all batches of validation rows, in order, whenever it is called; the last may be smaller.

    Raises:
        DataInvalid: there are no rows.
        FileMissing
    """
    rows = row_source(data)
    if isinstance(rows, Iterator):
        rows = list(rows)

    def parts() -> Iterator[Part]:
        batches = open_batches(rows, batch_size, epochs=1, shuffle=False, seed=0)
        for number in count():
            if (part := batches.part(number)) is None:
                return
            batches.forget(number + 1)
            yield part

    if isinstance(rows, Sequence) and len(rows) == 0:
        raise DataInvalid("there are no rows to validate on; give at least one, or leave validation out")
    return parts
