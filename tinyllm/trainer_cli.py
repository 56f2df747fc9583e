"""LightningCLI for this library: defaults, precedence of values, exit codes."""

import argparse
import logging
import sys
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from typing_extensions import override

from tinyllm.cli_errors import HelpfulLightningParser, known_classes, nearest
from tinyllm.data.module import TokenDataModule
from tinyllm.logger import RunLogger
from tinyllm.module import TinyLLM
from tinyllm.progress import RunProgressBar


class TinyLLMCLI(LightningCLI):
    """LightningCLI with two checkpoints, a CSV log in the run's folder, and clear precedence.

    Values are taken from defaults, then the checkpoint's model, then configuration files left to
    right, then the command line, each over the ones before.

    Args:
        checkpoint_model: The model's hyperparameters in the checkpoint to start from, if any.
    """

    def __init__(self, checkpoint_model: dict[str, Any]) -> None:
        self._checkpoint_model = checkpoint_model
        super().__init__(
            TinyLLM,
            TokenDataModule,
            parser_class=HelpfulLightningParser,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            auto_configure_optimizers=False,
        )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.add_lightning_class_args(ModelCheckpoint, "best_checkpoint")
        parser.set_defaults(
            {
                "checkpoint.save_top_k": 0,
                "checkpoint.save_last": True,
                "checkpoint.save_on_exception": True,
                "best_checkpoint.monitor": "validation/loss",
                "best_checkpoint.filename": "best",
                "trainer.strategy": {"class_path": "tinyllm.strategies.SyncStrategy"},
                "trainer.default_root_dir": "runs/default",
                "trainer.log_every_n_steps": 10,
                **{f"model.{name}": value for name, value in self._checkpoint_model.items()},
            }
        )

    @override
    def _parse_ckpt_path(self) -> None:
        """The checkpoint's hyperparameters were taken as defaults before parsing."""

    @override
    def before_instantiate_classes(self) -> None:
        """Trainer takes any string for a strategy; a misspelt one is refused here."""
        strategy = self._get(self.config, "trainer.strategy")
        known = ["auto", *StrategyRegistry.available_strategies()]
        if isinstance(strategy, str) and strategy not in known:
            best = nearest(strategy, [*known, *known_classes(Strategy)])
            self.parser.error(
                f"trainer.strategy is {strategy!r}, which is neither a registered name nor a class "
                f"path" + (f"; did you mean {best!r}?" if best else "")
            )

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        trainer = self._get(self.config_init, "trainer")
        if trainer["logger"] is None:
            kwargs["logger"] = RunLogger(trainer["default_root_dir"])
        own = trainer["callbacks"] or []
        own = own if isinstance(own, list) else [own]
        if trainer["enable_progress_bar"] is not False and not any(
            isinstance(callback, ProgressBar) for callback in own
        ):
            kwargs["callbacks"] = [*own, RunProgressBar()]
        return super().instantiate_trainer(**kwargs)


def _configs_first(args: list[str]) -> list[str]:
    """Moves configuration files before everything else, so that explicit values win over them."""
    configs: list[str] = []
    rest: list[str] = []
    remaining = iter(args)
    for argument in remaining:
        if argument in ("-c", "--config"):
            configs += [argument, *islice(remaining, 1)]
        elif argument.startswith("--config="):
            configs.append(argument)
        else:
            rest.append(argument)
    return configs + rest


def _checkpoint_model(args: list[str]) -> dict[str, Any]:
    """The model's hyperparameters of the checkpoint file named on the command line."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--ckpt_path")
    path = finder.parse_known_args(args)[0].ckpt_path
    if path is None or not Path(path).is_file():
        return {}  # a keyword such as `last`, or a wrong path, which the Trainer refuses
    checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return dict(checkpoint.get("hyper_parameters", {}))


def _quiet() -> None:
    """Keeps an advertisement and what a user can do nothing about out of the output."""
    warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)")
    warnings.filterwarnings("ignore", r"Precision .* is not supported by the model summary")
    messages = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    messages.addFilter(lambda record: "litlogger" not in record.getMessage())


def run_trainer_command(name: str, args: list[str]) -> None:
    """Runs ``fit``, ``validate``, ``test`` or ``predict``.

    Raises:
        SystemExit: 2 for unusable arguments, 143 when stopped by SIGTERM.
    """
    given = sys.argv
    _quiet()
    # LightningCLI reads the process's arguments
    sys.argv = [given[0], name, *_configs_first(args)]
    try:
        TinyLLMCLI(_checkpoint_model(args))
    except SIGTERMException:
        raise SystemExit(143) from None
    except MisconfigurationException as error:
        raise ValueError(str(error)) from error
    finally:
        sys.argv = given
