"""Checkpoint files that are either whole or not there."""

from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from typing_extensions import override

from tinyllm.checkpoint import load_checked
from tinyllm.files import replacing


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes to a temporary file beside the target, syncs it to disk and renames it.

    A run that is killed while it writes, or finds the disk full, leaves the previous checkpoint as
    it was, and no file that ``ckpt_path: last`` could mistake for one.
    """

    @override
    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        storage_options: Any | None = None,
    ) -> None:
        if storage_options is not None:
            raise TypeError(
                f"storage_options {storage_options!r} are not supported; leave them out"
            )
        if "://" in str(path):  # an object store shows a file only when it is whole
            super().save_checkpoint(checkpoint, path)
            return
        with replacing(Path(path)) as partial, partial.open("wb") as file:
            _save(checkpoint, file)

    def link_checkpoint(self, saved: str | Path, path: str | Path) -> None:
        """Gives a checkpoint that this has saved a second name.

        Each name is replaced, never its file written to, so what happens to one of them does not
        concern the other.

        Raises:
            OSError: It is gone, or there are no hard links between the two places.
        """
        if "://" in str(path):
            raise OSError(f"{path} is in an object store, which has no links")
        with replacing(Path(path)) as partial:
            partial.hardlink_to(saved)

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads tensors and plain values only, unless ``weights_only`` is False.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It is no checkpoint, or a damaged one.
        """
        if weights_only is False or "://" in str(path):
            return super().load_checkpoint(path, map_location, weights_only is not False)
        state: dict[str, Any] = load_checked(Path(path), map_location)
        return state


def _save(checkpoint: dict[str, Any], file: BinaryIO) -> None:
    try:
        torch.save(checkpoint, file)
    except RuntimeError as error:
        # torch's own complaint does not say that, for example, the disk is full
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise
