"""LightningCLI for this library: defaults, precedence of values, exit codes."""

import json
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from typing_extensions import override

from tinyllm.checkpoint import find_checkpoint, read_checkpoint
from tinyllm.cli_errors import SuggestionsMixin, known_classes, nearest, shortened
from tinyllm.cli_help import explain
from tinyllm.data.module import TokenDataModule
from tinyllm.folder_lock import alone_in
from tinyllm.logger import RunLogger
from tinyllm.module import TinyLLM
from tinyllm.predictions import TokenLossWriter
from tinyllm.progress import RunProgressBar
from tinyllm.quiet import quiet
from tinyllm.requeue import goes_on_from, requeued_by_slurm
from tinyllm.run_checkpoint import RunCheckpoint
from tinyllm.run_folder import RunFolder
from tinyllm.short_names import class_of
from tinyllm.summary import RunSummary

_LESS_MEMORY = (
    "a smaller data.validation_batch_size needs less memory",
    "trainer.strategy.micro_batch_size computes the same update in parts, which need less memory; "
    "if it fails while validating, lower data.validation_batch_size",
)
"""What to do when there was not enough: in an evaluation, in a training."""


class HelpfulLightningParser(SuggestionsMixin, LightningArgumentParser):
    """The parser of the Trainer's commands."""


class TinyLLMCLI(LightningCLI):
    """LightningCLI with a folder for each run and a clear precedence of values.

    Values are taken from defaults, then the checkpoint's model, then configuration files left to
    right, then the command line, each over the ones before.

    Args:
        command: One of the Trainer's.
        args: Its arguments, configuration files first.
    """

    def __init__(self, command: str, args: list[str]) -> None:
        self._command = command
        self._args = args
        super().__init__(
            TinyLLM,
            TokenDataModule,
            parser_class=HelpfulLightningParser,
            # evaluating must not replace the training run's configuration
            save_config_callback=RunFolder if command == "fit" else None,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            auto_configure_optimizers=False,
        )

    # --- parsing ------------------------------------------------------------------------------

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(RunCheckpoint, "checkpoint")
        parser.add_lightning_class_args(ModelCheckpoint, "best_checkpoint")
        parser.set_defaults(
            {
                "checkpoint.save_top_k": 0,
                "checkpoint.save_last": True,
                "checkpoint.save_on_exception": True,
                "checkpoint.enable_version_counter": False,
                "best_checkpoint.monitor": "validation/loss",
                "best_checkpoint.filename": "best",
                "best_checkpoint.enable_version_counter": False,
                "trainer.strategy": {"class_path": "tinyllm.strategies.SyncStrategy"},
                "trainer.default_root_dir": "runs/default",
                "trainer.log_every_n_steps": 10,
            }
        )

    @override
    def setup_parser(self, *args: Any) -> None:
        super().setup_parser(*args)
        self.parser.prog = f"tinyllm {self._command}"
        explain(self._parser(self._command), self._command)

    @override
    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Only the one to run, since each takes a parser with hundreds of options."""
        return {self._command: super().subcommands()[self._command]}

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        # a first time to learn of the checkpoint, whose model gives the defaults of the second
        arguments = [self._command, *self._args]
        first = [argument for argument in arguments if not argument.startswith("--print_config")]
        only_printed = first != arguments
        self.config = parser.parse_args(first)
        given = self.config[self._command]
        for name, key in (("trainer", "strategy"), ("checkpoint", "dirpath")):
            if not hasattr(given[name], key):  # the parser takes null and lists for a section
                self._parser(self._command).error(
                    f"{name} is {given[name]!r}; give its options, or leave it out"
                )
        self._check_strategy(given.trainer.strategy)
        self._check_values(given)
        if self._command == "fit" and goes_on_from(self._file_of("last", given)):
            arguments += ["--ckpt_path", "last"]
            given.ckpt_path = "last"
        path = self._checkpoint_path(given)
        if path is None and not only_printed:
            self._refuse_what_is_missing(given)
        elif path is not None:
            state = read_checkpoint(path)
            if self._command == "fit" and not state.get("optimizer_states"):
                raise ValueError(
                    f"{path} holds weights alone, and no run can go on from it; start a new one: "
                    f"`tinyllm export {path} --to hf DIR`, then fit with --model.init_from DIR"
                )
            # plain values, as the parser knows them; another module's are of no use here
            saved = state.get("hyper_parameters", {})
            known = {"preset", "config", "optimizer", "schedule"} & set(saved)
            self._parser(self._command).set_defaults({f"model.{key}": saved[key] for key in known})
            if given.model.init_from is not None:  # a start that lies behind the checkpoint
                size = {key: json.dumps(saved.get(key)) for key in ("preset", "config")}
                for key, value in {"init_from": "null", **size}.items():
                    arguments += [f"--model.{key}", value]
        if path is not None or first != arguments:
            self.config = parser.parse_args(arguments)

    def _check_strategy(self, strategy: Any) -> None:
        """Trainer takes any string for a strategy; a misspelt one is refused here."""
        known = ["auto", *StrategyRegistry.available_strategies()]
        if isinstance(strategy, str) and strategy not in known:
            classes = known_classes(Strategy)
            if strategy in classes:
                of_class = [n for n in known if (class_of(n) or [None])[0] == strategy]
                self._parser(self._command).error(
                    f"trainer.strategy is {strategy!r}, a class without its options; give them, as "
                    "in --trainer.strategy.micro_batch_size 4, or take a registered name: "
                    f"{', '.join(of_class or known)}"
                )
            best = nearest(strategy, [*known, *classes])
            self._parser(self._command).error(
                f"trainer.strategy is {strategy!r}, which is neither a registered name nor a class "
                f"path" + (f"; did you mean {best!r}?" if best else "")
            )

    def _check_values(self, given: Any) -> None:
        """Refuses what Lightning would take, and would go wrong later."""
        parser = self._parser(self._command)
        accumulated = given.trainer.accumulate_grad_batches
        if accumulated < 1:
            parser.error(f"trainer.accumulate_grad_batches is {accumulated}; it must be at least 1")
        interval = given.trainer.val_check_interval
        if isinstance(interval, int | float) and interval <= 0:
            parser.error(
                f"trainer.val_check_interval is {interval}; it must be above 0. For no validation "
                "set trainer.limit_val_batches to 0"
            )
        if given.trainer.default_root_dir is None:
            parser.error("trainer.default_root_dir is null; give the run's folder")
        best = given.best_checkpoint
        if best.save_top_k not in (0, 1) and "{" not in (best.filename or "{"):
            parser.error(
                f"best_checkpoint.save_top_k is {best.save_top_k}, and all have the one file name "
                f"{best.filename!r}; give them names of their own, as in "
                "--best_checkpoint.filename 'best-{step}'"
            )

    @override
    def _parse_ckpt_path(self) -> None:
        """The checkpoint's hyperparameters were taken as defaults before parsing."""

    def _wanted(self, config: Any) -> str | None:
        """What ``ckpt_path`` says, or the last checkpoint where one is needed."""
        wanted: str | None = config.ckpt_path or ("last" if self._command != "fit" else None)
        return wanted

    def _checkpoint_path(self, config: Any) -> Path | None:
        """The file that ``ckpt_path`` stands for; None if there is none, or Lightning knows it."""
        given = self._wanted(config)
        if given is None or given in ("hpc", "registry"):
            return None
        if not Path(given).is_file() and ("://" in str(given) or given.startswith("registry:")):
            return None
        return self._file_of(given, config) if given in ("last", "best") else Path(given)

    def _refuse_what_is_missing(self, config: Any) -> None:
        """Raises FileNotFoundError for a checkpoint of the run that is wanted and not there."""
        given = self._wanted(config)
        starts_anew = self._command == "fit" and given == "last"
        if given not in ("last", "best") or starts_anew:
            return
        folder, name = config.trainer.default_root_dir, config.best_checkpoint.filename
        name = name or "{epoch}-{step}"  # as Lightning calls them then
        if given == "best" and "{" in name:
            raise FileNotFoundError(
                f"the best checkpoints of the run in {folder} are called {name}.ckpt; name one of "
                "them with --ckpt_path FILE"
            )
        raise FileNotFoundError(
            f"there is no {given}.ckpt of a run in {folder}; name a checkpoint with --ckpt_path "
            "FILE, or the run's folder with --trainer.default_root_dir"
        )

    def _file_of(self, name: str, config: Any) -> Path | None:
        """The run's newest file of a name, ``last`` or ``best``."""
        callback = config.checkpoint if name == "last" else config.best_checkpoint
        folder = callback.dirpath or Path(config.trainer.default_root_dir) / "checkpoints"
        stem = "last" if name == "last" else callback.filename
        return None if stem is None else find_checkpoint(Path(folder), stem)

    # --- instantiating ------------------------------------------------------------------------

    @override
    def after_instantiate_classes(self) -> None:
        self.model.check_data(self.datamodule)

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        given = self._get(self.config_init, "trainer")
        bare, fitting = given["barebones"], self._command == "fit"
        own = given["callbacks"] or []
        callbacks = list(own) if isinstance(own, list) else [own]
        if not bare:
            kwargs["logger"] = _loggers(given["logger"], given["default_root_dir"], fitting)
        has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
        if given["enable_progress_bar"] is not False and not bare and not has_bar:
            callbacks.append(RunProgressBar())
        if given["enable_model_summary"] is None:
            kwargs["enable_model_summary"] = False
            if not bare:
                callbacks.append(RunSummary())
        if given["enable_checkpointing"] is False or bare:
            self._parser(self._command).callback_keys.clear()
        if self._command == "predict":
            callbacks.append(TokenLossWriter())
        kwargs["callbacks"] = callbacks
        try:
            trainer: Trainer = super().instantiate_trainer(**kwargs)
        except TypeError as error:
            if "devices" not in str(error):
                raise
            raise ValueError(f"trainer.devices is {given['devices']!r}: {error}") from error
        except RuntimeError as error:
            if "more than one stateful callback" not in str(error):
                raise
            kind = str(error).split("`")[1]
            raise ValueError(
                f"two callbacks are a {kind} with the same interval, so a checkpoint cannot tell "
                "them apart; give the one in trainer.callbacks another, as with "
                "every_n_train_steps, or leave it out (`checkpoint` is a RunCheckpoint and "
                "`best_checkpoint` a ModelCheckpoint)"
            ) from error
        known: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        # the folder is made ready first; the last checkpoint knows what the best one has just saved
        known.sort(
            key=lambda callback: (
                isinstance(callback, RunCheckpoint) - isinstance(callback, RunFolder)
            )
        )
        return trainer

    # --- running ------------------------------------------------------------------------------

    @override
    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        given = kwargs["ckpt_path"]
        if subcommand == "fit" and given != "best":
            return kwargs  # Lightning knows the others
        kwargs["ckpt_path"] = self._checkpoint_path(self.config[subcommand]) or given
        if subcommand == "predict":
            kwargs["return_predictions"] = False  # they go to a file
        return kwargs

    def fit(self, **kwargs: Any) -> None:
        """Trains; Ctrl-C stops after the running update, so that the run can resume exactly."""
        trainer = self.trainer
        # the folder is given back last, when everything is saved
        with (
            _alone_in_its_folder(trainer),
            requeued_by_slurm(trainer),
            _interrupted_between_updates(trainer),
        ):
            trainer.fit(**kwargs)


def _alone_in_its_folder(trainer: Trainer) -> AbstractContextManager[None]:
    """Keeps other runs out of a run's folder; one process does it for all ranks."""
    folder = str(trainer.default_root_dir)
    if not trainer.is_global_zero or getattr(trainer, "fast_dev_run", False) or "://" in folder:
        return nullcontext()
    return alone_in(Path(folder))


@contextmanager
def _interrupted_between_updates(trainer: Trainer) -> Iterator[None]:
    """Turns the first Ctrl-C into an orderly stop, and the second one into the usual interrupt.

    Raises:
        KeyboardInterrupt: After an orderly stop.
    """
    interrupted = False
    stop_all_ranks = getattr(trainer.strategy, "stop_all_ranks", None)

    def stop(*_: Any) -> None:
        nonlocal interrupted
        signal.signal(signal.SIGINT, before)
        if trainer.world_size == 1:
            trainer._signal_connector.received_sigterm = True
        elif stop_all_ranks is None or not stop_all_ranks():
            raise KeyboardInterrupt
        interrupted = True
        if trainer.is_global_zero:
            when = "after this update" if trainer.world_size == 1 else "at the next log point"
            sys.stderr.write(f"\nStopping {when}. Ctrl-C again stops at once.\n")

    before = signal.getsignal(signal.SIGINT)
    orderly = before is signal.default_int_handler
    if orderly:
        signal.signal(signal.SIGINT, stop)
    try:
        yield
    except SIGTERMException:
        if interrupted:
            raise KeyboardInterrupt from None
        raise
    finally:
        if orderly:
            signal.signal(signal.SIGINT, before)


def _loggers(given: Any, folder: str | Path, fitting: bool) -> list[Logger]:
    """A run's own log first, which decides where the run's files lie, and then what is asked for.

    Args:
        given: Loggers of the configuration, or one; a Boolean or None stands for the usual.
        folder: The run's.
        fitting: Whether a run is recorded; evaluations go to the loggers of the configuration.
    """
    if given is False:
        return []
    others = [] if given is None or given is True else given
    others = list(others) if isinstance(others, Iterable) else [others]
    if not fitting or any(isinstance(logger, RunLogger) for logger in others):
        return others
    return [RunLogger(folder), *others]


def run_trainer_command(name: str, args: list[str]) -> None:
    """Runs ``fit``, ``validate``, ``test`` or ``predict``.

    Args:
        name: Which of them.
        args: Its arguments; what comes later wins.

    Raises:
        SystemExit: 2 for unusable arguments, 143 when stopped by SIGTERM, 138 when stopped by
            SIGUSR1 in a Slurm job, which is requeued.
        KeyboardInterrupt: When stopped by Ctrl-C.
        ValueError: If the settings do not go together.
    """
    given = sys.argv
    quiet(name)
    # LightningCLI reads the process's arguments, and Lightning starts other ranks with them
    sys.argv = [given[0], name, *args]
    try:
        TinyLLMCLI(name, args)
    except SIGTERMException:
        raise SystemExit(143) from None
    except (MisconfigurationException, ValueError) as error:
        raise ValueError(shortened(str(error))) from error
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            error.add_note(_LESS_MEMORY[name == "fit"])
        raise
    finally:
        sys.argv = given
