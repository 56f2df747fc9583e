"""The line that puts a run's validation loss beside a bigram table's."""

from pathlib import Path

import numpy as np
import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from simulation import CONFIG, Batches, batches, new_trainer, tiny, token_cache

from tinyllm import TokenDataModule
from tinyllm.callbacks import BigramBaseline
from tinyllm.data.bigram import bigram_loss
from tinyllm.data.cache import TokenCache
from tinyllm.strategies import SyncStrategy


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bigram")
    ids = np.random.default_rng(0).zipf(1.5, 4_000).clip(1, CONFIG.vocab_size - 1)
    ids[23::24] = 0
    return token_cache(folder, ids, validation_fraction=0.2)


@pytest.mark.parametrize("validates", [True, False])
def test_both_losses_are_printed(
    cache: str, capsys: pytest.CaptureFixture[str], validates: bool
) -> None:
    trainer = new_trainer(
        SyncStrategy(compile=False),
        callbacks=[BigramBaseline()],
        max_steps=2,
        val_check_interval=2,
        num_sanity_val_steps=0,
        limit_val_batches=1.0 if validates else 0,
    )
    trainer.fit(tiny(), TokenDataModule(cache, CONFIG.context, 8, 8))
    reached = (
        f"{trainer.callback_metrics['validation/loss'].item():.3f}"
        if validates
        else "no validation ran"
    )
    opened = TokenCache.open(Path(cache))
    table = bigram_loss(opened.split("train"), opened.split("validation"), CONFIG.vocab_size)
    assert 0 < table < np.log(CONFIG.vocab_size)
    line = f"validation loss in nats per token: {reached}; a bigram table's: {table:.3f}"
    assert capsys.readouterr().out.count(line) == 1


def test_other_data_is_refused() -> None:
    trainer = new_trainer(SyncStrategy(compile=False), callbacks=[BigramBaseline()], max_steps=1)
    with pytest.raises(MisconfigurationException, match="the data is NoneType; leave"):
        trainer.fit(tiny(), Batches(batches(1)))
