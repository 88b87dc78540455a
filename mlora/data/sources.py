"""What a data set is read from: a file, or a data set on the Hugging Face hub."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mlora.config import ROW_SUFFIXES, DatasetConfig
from mlora.data.reader import check_file, file_kind, read_rows
from mlora.files import readable, sha256_of
from mlora.types import Row, UserError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_DATA_SUFFIXES = (*ROW_SUFFIXES, ".json", ".txt")


@dataclass(frozen=True, kw_only=True)
class FileSource:
    """The rows of one file; ``max_samples`` takes the first so many."""

    path: Path
    max_samples: int | None = None

    @property
    def name(self) -> str:
        return str(self.path)

    def content(self) -> str:
        """A hash of all that decides which rows there are. Raises UserError where the file cannot be read."""
        self._check()
        with readable(self.path):
            digest = sha256_of(self.path)
        return f"{digest} {file_kind(self.path)} {self.max_samples}"

    def stamp(self) -> tuple[int, ...]:
        """Changes whenever the file does."""
        stat = self.path.stat()
        return stat.st_ino, stat.st_size, stat.st_mtime_ns

    def rows(self) -> Iterator[Row]:
        """The rows. Raises UserError as ``read_rows``."""
        self._check()
        return itertools.islice(read_rows(self.path), self.max_samples)

    def _check(self) -> None:
        looks_like_an_id = re.fullmatch(r"[\w.-]+/[\w.-]+", self._tail()) and self.path.suffix not in _DATA_SUFFIXES
        if looks_like_an_id and not os.path.lexists(self.path):
            hint = f"a data set on the hub is written hub: {self._tail()}"
            raise UserError(f"{self.path}: cannot be read: No such file or directory; {hint}")
        check_file(self.path)

    def _tail(self) -> str:
        return "/".join(self.path.parts[-2:])


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """The rows of a data set on the hub, streamed through the package datasets. Scripts of a data set never run."""

    hub: str
    subset: str | None
    split: str
    revision: str | None
    max_samples: int | None

    @property
    def name(self) -> str:
        return f"{self.hub}/{self.subset}:{self.split}" if self.subset else f"{self.hub}:{self.split}"

    @cached_property
    def commit(self) -> str:
        """The commit that the revision is now. Raises UserError where the hub does not say."""
        if self.revision and _COMMIT.fullmatch(self.revision):
            return self.revision
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        try:
            commit = HfApi().dataset_info(self.hub, revision=self.revision).sha
        except RevisionNotFoundError:
            raise UserError(
                f"hub data set {self.hub}: has no revision {self.revision!r}; mend dataset.revision"
            ) from None
        except RepositoryNotFoundError:
            raise UserError(
                f"hub data set {self.hub}: there is none of that name, or it is private or gated: "
                "look at its page, then log in with `hf auth login`"
            ) from None
        except Exception as error:  # the client's, its HTTP library's and the system's
            raise self._unreachable(error) from None
        assert isinstance(commit, str)
        return commit

    def content(self) -> str:
        """Names all that decides which rows there are."""
        return f"hub {self.hub} {self.subset} {self.split} {self.commit} {self.max_samples}"

    def stamp(self) -> tuple[int, ...]:
        """A commit never changes."""
        return ()

    def rows(self) -> Iterator[Row]:
        """The rows, with their number from 1 as line. Raises UserError where they cannot be had."""
        datasets = _datasets(self.hub)
        try:
            stream = datasets.load_dataset(
                self.hub, name=self.subset, split=self.split, revision=self.commit, streaming=True
            )
            for line, value in enumerate(itertools.islice(stream, self.max_samples), 1):
                yield Row(value, self.name, line)
        except UserError:
            raise
        except (OSError, datasets.exceptions.DatasetNotFoundError) as error:
            raise self._unreachable(error) from None
        except Exception as error:  # readers of many formats are behind this, each with errors of its own
            raise UserError(f"hub data set {self.name}: cannot be read: {_reason(error)}") from None

    def _unreachable(self, error: Exception) -> UserError:
        return UserError(
            f"hub data set {self.hub}: the hub cannot be reached: {_reason(error)}; try again, or download the files "
            "and give them as path (rows that were tokenized once need no hub if revision is a commit)"
        )


Source = FileSource | HubSource


def open_source(config: DatasetConfig) -> Source:
    """What the configuration names. Nothing is read yet."""
    if config.path is not None:
        return FileSource(path=config.path, max_samples=config.max_samples)
    assert config.hub is not None
    return HubSource(
        hub=config.hub,
        subset=config.subset,
        split=config.split or "train",
        revision=config.revision,
        max_samples=config.max_samples,
    )


def _datasets(hub: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError(f"hub data set {hub}: needs the package datasets: pip install 'mlora-engine[data]'") from None
    return datasets


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
