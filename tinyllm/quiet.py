"""Messages and warnings of libraries that tell a user of the command line nothing."""

import logging
import warnings


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a message of Lightning's says more than an advertisement or than we say ourselves."""
    message = record.getMessage()
    return not any(
        word in message
        for word in (
            "litlogger",
            "litmodels",
            "TPU available: False",
            "`Trainer.fit` stopped: `max_",
        )
    )


def quiet(command: str) -> None:
    """Keeps advertisements and what a user can do nothing about out of the output."""
    warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)")
    warnings.filterwarnings("ignore", r"Precision .* is not supported by the model summary")
    # a resumed run's folder; another run's has been moved away
    warnings.filterwarnings("ignore", r"Checkpoint directory .* exists and is not empty")
    if command != "fit":  # nothing is written, so it does not matter where a run's files were
        warnings.filterwarnings("ignore", r"The dirpath has changed from")
    warnings.filterwarnings("ignore", r"Couldn't infer the batch indices")
    warnings.filterwarnings("ignore", r".*sync_dist=True")  # what is logged is of all ranks already
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_news)
