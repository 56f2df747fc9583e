"""Searches learning rate and weight decay: ``python optuna_sweep.py CONFIG FOLDER``."""

import csv
import subprocess
import sys
from pathlib import Path

import optuna

config, folder = sys.argv[1], Path(sys.argv[2])


def lowest_loss(trial: optuna.Trial) -> float:
    """Trains once, and reads the lowest validation loss."""
    run = folder / f"trial-{trial.number}"
    lr = trial.suggest_float("lr", 1e-3, 2e-2, log=True)
    decay = trial.suggest_float("weight_decay", 0.01, 0.3, log=True)
    subprocess.run(
        [
            *("tinyllm", "fit", "--config", config),
            *("--trainer.default_root_dir", str(run)),
            *("--model.optimizer.lr", str(lr)),
            *("--model.optimizer.weight_decay", str(decay)),
        ],
        check=True,
    )
    with (run / "metrics.csv").open() as file:
        losses = [row["validation/loss"] for row in csv.DictReader(file)]
    return min(float(loss) for loss in losses if loss)


study = optuna.create_study()
study.optimize(lowest_loss, n_trials=20)
print(study.best_params, study.best_value)
