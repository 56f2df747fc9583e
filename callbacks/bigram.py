"""A scale for the validation loss: that of a table of token pairs on the same split."""

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from tinyllm.data.bigram import bigram_loss
from tinyllm.data.module import TokenDataModule


class BigramBaseline(Callback):
    """Prints, after a fit, the validation loss beside a bigram table's.

    The table counts the pairs of the training split and is evaluated on the validation split. It is
    meant for small vocabularies: it takes about a second for 2,048 ids and 3 million tokens.
    """

    @override
    @rank_zero_only
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data = getattr(trainer, "datamodule", None)
        if not isinstance(data, TokenDataModule):
            raise MisconfigurationException(
                f"BigramBaseline needs the token cache of a TokenDataModule, and the data is "
                f"{type(data).__name__}; leave the callback out"
            )
        table = bigram_loss(data.stream("train"), data.stream("validation"), data.vocab_size)
        loss = trainer.callback_metrics.get("validation/loss")
        reached = "no validation ran" if loss is None else f"{loss.item():.3f}"
        print(f"\nvalidation loss in nats per token: {reached}; a bigram table's: {table:.3f}")
