"""What of a checkpoint no leaf takes: it stays in its files when a model is loaded, and goes along when it is saved."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from params.errors import CheckpointError
from params.files import StoredTensor, listed, tensor_names
from params.names.rules import Names
from params.quant.description import FLOAT, read_description

Stamp = tuple[int, int, int]
"""A file's size, time of change and number: what differs when another file has taken its place."""


@dataclass
class Unread:
    """Tensors of a checkpoint that no model here reads, by their own names: vision towers, projectors and the like.

    Their values stay where they are; `stamps` tell whether the files are still those of the load.
    """

    directory: Path
    tensors: dict[str, StoredTensor]
    stamps: dict[Path, Stamp]

    @staticmethod
    def of(directory: Path, tensors: Mapping[str, StoredTensor], names: Names, paths: Collection[str]) -> Unread:
        """The tensors that a tree with the leaf `paths` passes over, by the family's `names`."""
        found = {
            name: stored for name, stored in tensors.items() if names.ignored(names.canonical(name), paths) is not None
        }
        return Unread(directory, found, _stamps(found))

    def check(self) -> None:
        """Raise `CheckpointError` where the files are gone or others than when the model was loaded."""
        changed = [file.name for file, stamp in self.stamps.items() if not file.is_file() or _stamp(file) != stamp]
        if changed:
            raise CheckpointError(
                f"{self.directory}: {listed(sorted(changed))} changed or went away since the model was loaded, with "
                f"tensors that no model here reads and that are saved with it: {listed(self.tensors, 3)}; load the "
                "model again, or save the parameters alone with params.save"
            )

    def words(self) -> dict[str, str]:
        """What a description says of the tensors: the one in the directory, or that they are not quantised."""
        found = read_description(self.directory, str) if self.tensors else None
        words = {} if found is None else found.words
        return {name: words.get(name, FLOAT) for name in self.tensors}

    def saved_to(self, directory: Path) -> None:
        """Find the tensors in their new places, if they were written to where they came from."""
        if self.tensors and directory.resolve() == self.directory.resolve():
            stored = tensor_names(directory)
            self.tensors = {name: stored[name] for name in self.tensors}
            self.stamps = _stamps(self.tensors)


def _stamps(tensors: Mapping[str, StoredTensor]) -> dict[Path, Stamp]:
    return {stored.file: _stamp(stored.file) for stored in tensors.values()}


def _stamp(file: Path) -> Stamp:
    try:
        found = file.stat()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return found.st_size, found.st_mtime_ns, found.st_ino
