"""TokenDataModule: a token cache as Lightning sees it, one loader per split and rank."""

from pathlib import Path
from typing import Any, Literal

import lightning
import torch
from lightning.pytorch.trainer.states import TrainerFn

from tinyllm.arguments import check_choice
from tinyllm.data.cache import TokenCache
from tinyllm.data.loader import TokenLoader
from tinyllm.data.manifest import SPLITS, Split
from tinyllm.data.resume import repair_restored_epoch
from tinyllm.data.stream import TokenStream
from tinyllm.data.tokenizer import Tokenizer

Residency = Literal["auto", "host", "device"]


class TokenDataModule(lightning.LightningDataModule):
    """Token rows from a cache that `tinyllm prepare` has made.

    Args:
        cache: Folder of the token cache.
        context: Context length T in tokens; a row holds T inputs and their T targets.
        batch_size: Rows per optimizer update, over all workers and ranks together.
        validation_batch_size: Rows per validation, test or prediction batch, over all ranks.
        seed: Decides the order of the training rows, together with the epoch.
        residency: Where the tokens live. `host` reads memory-mapped files, with a prefetch
            thread; `device` keeps a split in the GPU's memory and makes batches there; `auto`
            takes the device when it is a CUDA GPU and the split needs less than a quarter of its
            free memory.
    """

    def __init__(
        self,
        cache: str,
        context: int = 1024,
        batch_size: int = 128,
        validation_batch_size: int = 32,
        seed: int = 0,
        residency: Residency = "auto",
    ) -> None:
        super().__init__()
        check_choice("residency", residency, Residency)
        self.context = context
        self.batch_size = batch_size
        self.validation_batch_size = validation_batch_size
        self.seed = seed
        self.residency = residency
        self._folder = Path(cache)
        self._cache: TokenCache | None = None
        self._train_loader: TokenLoader | None = None
        self._restored_position: dict[str, Any] | None = None
        self._tokenizer_state: dict[str, Any] | None = None
        self._streams: dict[Split, TokenStream] = {}

    @property
    def cache(self) -> TokenCache:
        """The opened token cache; raises `CacheError` when it is missing or damaged."""
        if self._cache is None:
            self._cache = TokenCache.open(self._folder)
        return self._cache

    @property
    def vocab_size(self) -> int:
        """Every token id is below this."""
        return self.cache.vocab_size

    def stream(self, split: Split) -> TokenStream:
        """The tokens of a split, as they were when the data was set up."""
        return self._streams.get(split) or self.cache.split(split)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer stored in the cache."""
        return self.cache.tokenizer()

    def prepare_data(self) -> None:
        """Hash the cache's files once per node, so that damage is an error before training."""
        self.cache.verify()

    def setup(self, stage: str) -> None:
        """Open the cache on this rank.

        All of it, so that a run goes on where somebody deletes or replaces the cache meanwhile.
        """
        cache = self.cache
        has_tokenizer = cache.manifest.tokenizer.file is not None
        self._tokenizer_state = cache.tokenizer().to_state() if has_tokenizer else None
        self._streams = {
            name: cache.split(name) for name in SPLITS if name in cache.manifest.splits
        }
        if stage == "fit":  # after it, a checkpoint still holds where the fit has come to
            self._train_loader = None
            self._restored_position = None

    def state_dict(self) -> dict[str, Any]:
        """The training loader's position and the tokenizer, for the checkpoint."""
        state: dict[str, Any] = {"tokenizer": self._tokenizer_state}
        if self._train_loader is not None:
            state["train"] = self._train_loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position.

        Lightning restores the loader by itself too, but not when something asked for the number
        of steps, as learning-rate schedules do, and so made the loader before the restore.

        Raises:
            ValueError: The state is that of other data, or of text with another tokenizer.
        """
        theirs, own = state.get("tokenizer"), self._tokenizer_state
        if theirs is not None and own is not None and theirs != own:
            raise ValueError(
                f"the checkpoint's model was trained with another tokenizer than that of "
                f"{self._folder}, whose ids are other text to it; prepare that text with the "
                "model's own tokenizer: `tinyllm prepare --tokenizer` takes the cache that it was "
                "trained on, or tokenizer.json of `tinyllm export CHECKPOINT --to hf DIR`"
            )
        if "train" not in state or (self.trainer and self.trainer.state.fn != TrainerFn.FITTING):
            return
        if self._train_loader is None:
            self._restored_position = state["train"]
        else:
            self._train_loader.load_state_dict(state["train"])
        if self.trainer is not None:
            repair_restored_epoch(self.trainer, state["train"]["epoch"])

    def train_dataloader(self) -> TokenLoader:
        """Shuffled rows of the train split; `batch_size` of them make one update."""
        trainer = self.trainer
        if trainer is None:
            return self._loader("train", self.batch_size, shuffle=True)
        groups = getattr(trainer.strategy, "data_groups", trainer.world_size)
        if 1 <= self.batch_size < groups:
            raise ValueError(
                f"batch_size is {self.batch_size} and {groups} workers or ranks share a batch's "
                f"rows; some would never see any: make it at least {groups}"
            )
        loader = self._loader(
            "train",
            self.batch_size,
            # `overfit_batches` wants the same batches in every epoch.
            shuffle=not getattr(trainer, "overfit_batches", 0),
            groups=groups,
            epoch=trainer.current_epoch,
        )
        limit = trainer.limit_train_batches
        if limit is not None:
            # The numbers Lightning itself computes: an int counts batches, a float is a share.
            loader.limit_batches = limit if isinstance(limit, int) else int(len(loader) * limit)
        if self._restored_position is not None:
            loader.load_state_dict(self._restored_position)
            self._restored_position = None
        self._train_loader = loader
        return loader

    def val_dataloader(self) -> TokenLoader:
        """The validation split in order, every target once."""
        return self._evaluation_loader("validation")

    def test_dataloader(self) -> TokenLoader:
        """The test split in order, every target once."""
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> TokenLoader:
        """The validation split in order, every target once."""
        return self._evaluation_loader("validation")

    def _evaluation_loader(self, split: Split) -> TokenLoader:
        # Evaluation is by rank and not by worker: there is one averaged model.
        groups = 1 if self.trainer is None else self.trainer.world_size
        return self._loader(split, self.validation_batch_size, shuffle=False, groups=groups)

    def _loader(
        self, split: Split, batch_size: int, *, shuffle: bool, groups: int = 1, epoch: int = 0
    ) -> TokenLoader:
        trainer = self.trainer
        ranks, rank = (1, 0) if trainer is None else (trainer.world_size, trainer.global_rank)
        root = torch.device("cpu") if trainer is None else trainer.strategy.root_device
        if groups % ranks:
            raise ValueError(
                f"{groups} workers cannot be placed evenly on {ranks} ranks; use a number of "
                f"workers that is a multiple of the ranks"
            )
        stream = self.stream(split)
        on_device = self.residency == "device" or (
            self.residency == "auto" and _fits(len(stream) * stream.dtype.itemsize, root)
        )
        return TokenLoader(
            stream,
            context=self.context,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=self.seed,
            groups=groups,
            local_groups=range(rank * groups // ranks, (rank + 1) * groups // ranks),
            pin_memory=root.type == "cuda" and not on_device,
            device=root if on_device else None,
            epoch=epoch,
        )


def _fits(stream_bytes: int, device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return stream_bytes < free_bytes // 4
