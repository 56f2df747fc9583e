"""What ``--help`` says about the Trainer's commands: titles, order, and texts of our own."""

from typing import Any

_SUMMARIES = {
    "fit": "Train a model. Values are taken from defaults, then from the checkpoint given with "
    "--ckpt_path, then from configuration files left to right, then from the command line; each "
    "over the ones before, wherever they stand.",
    "validate": "Loss and perplexity of a checkpoint over the whole validation split. The model is "
    "the checkpoint's, unless a configuration file or an option says otherwise.",
    "test": "Loss and perplexity of a checkpoint over the whole test split. The model is the "
    "checkpoint's, unless a configuration file or an option says otherwise.",
    "predict": "Write the loss of every token of the validation split, in its order, to "
    "predictions.npy in the run's folder.",
}
_USAGE = {
    "fit": "tinyllm fit --config FILE [--config FILE …] [options]",
    "validate": "tinyllm validate --config FILE [--ckpt_path FILE] [options]",
    "test": "tinyllm test --config FILE [--ckpt_path FILE] [options]",
    "predict": "tinyllm predict --config FILE [--ckpt_path FILE] [options]",
}
_TITLES = {
    "model": "model: what is trained",
    "model.optimizer": "model.optimizer: AdamW",
    "data": "data: rows of tokens from a cache that `tinyllm prepare` has made",
    "checkpoint": "checkpoint: last.ckpt, the state to resume from (Lightning's ModelCheckpoint)",
    "best_checkpoint": "best_checkpoint: best.ckpt, the state with the lowest validation loss; "
    "options as for checkpoint",
    "trainer": "trainer: everything that Lightning's Trainer takes",
}
_CKPT_PATH = {
    "fit": "A checkpoint to resume from: a file, or `last` or `best` for one in the run's folder; "
    "without a last one, training starts anew. Its model's hyperparameters are defaults. A Slurm "
    "job that is started again takes the last one that it wrote itself, whatever is given here.",
    "evaluation": "The checkpoint: a file, or `last` or `best` for one in the run's folder; null "
    "takes the last one.",
}
_TEXTS = {
    "config": "A YAML or JSON file with these options; several overlay left to right.",
    "seed_everything": "Seed of the initial weights; true takes PL_GLOBAL_SEED, or 0 where that "
    "is not set; false sets none.",
    "trainer.strategy": "How updates run: a class path, or a registered name such as sync, "
    "packed4_awc, packed4_atc or packed8_awc. Options follow as "
    "--trainer.strategy.micro_batch_size 4, and --trainer.strategy.help CLASS lists them.",
    "trainer.default_root_dir": "The run's folder, for config.yaml, metrics.csv and checkpoints/. "
    "What another run left there is moved to earlier-1/ and so on.",
    "trainer.logger": "Where metrics go beside the run's metrics.csv; false logs nothing. For "
    "example --trainer.logger+=TensorBoardLogger --trainer.logger.save_dir=FOLDER, or "
    "--trainer.logger+=WandbLogger --trainer.logger.project=NAME.",
    "trainer.enable_model_summary": "Null prints what is trained, on what and for how long; true "
    "prints Lightning's table.",
    "checkpoint.dirpath": "Folder of the files; null takes checkpoints/ in the run's folder.",
    "checkpoint.filename": "Name of files beside last.ckpt, such as '{step}'; needs save_top_k.",
    "checkpoint.monitor": "Logged value by which the best are chosen.",
    "checkpoint.save_last": "Whether last.ckpt is kept; link makes it a link to another file.",
    "checkpoint.save_top_k": "How many of the best by monitor are kept, -1 keeps all.",
    "checkpoint.save_on_exception": "Whether the state is saved when SIGTERM, Ctrl-C or an error "
    "ends the run between two updates.",
    "checkpoint.auto_insert_metric_name": "Whether names in filename stand before their values.",
    "checkpoint.every_n_train_steps": "Updates between two checkpoints. Without any interval there "
    "is one after each validation, and in any case one after the last update.",
    "checkpoint.train_time_interval": "Time between two checkpoints, such as 0:30:00.",
    "checkpoint.every_n_epochs": "Epochs between two checkpoints.",
    "checkpoint.save_on_train_epoch_end": "Whether an epoch's checkpoint is written after its last "
    "update (true) or after validation (false).",
    "checkpoint.enable_version_counter": "Whether a file that exists is left alone and the new one "
    "called name-v1 and so on.",
    "weights_only": "Whether checkpoints may hold tensors and plain values only; null means true.",
}


def explain(parser: Any, command: str) -> None:
    """Gives the parser of one of the Trainer's commands our texts and puts sections in order.

    Args:
        parser: The command's parser, with all its options.
        command: Its name.
    """
    parser.prog = f"tinyllm {command}"
    parser.usage = _USAGE[command]
    parser.description = _SUMMARIES[command]
    ckpt_path = _CKPT_PATH["fit" if command == "fit" else "evaluation"]
    texts = _TEXTS | {"ckpt_path": ckpt_path}
    for action in parser._actions:
        if action.dest in texts:
            action.help = texts[action.dest]
        elif action.dest.startswith("best_checkpoint."):
            action.help = f"See --{action.dest.removeprefix('best_')}."
    titles = {f"--{section}": title for section, title in _TITLES.items()}
    places = ["options", *_TITLES]
    order = {}
    for group in parser._action_groups:
        flags = [flag for action in group._group_actions for flag in action.option_strings]
        section = next((flag for flag in flags if flag in titles), None)
        if section is not None:
            group.title = titles[section]
        elif "--ckpt_path" in flags:
            group.title = "checkpoint to start from"
        order[id(group)] = places.index(section[2:]) if section else 0
    parser._action_groups.sort(key=lambda group: order[id(group)])
