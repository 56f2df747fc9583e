"""Unusable arguments: exit code 2, and a line with the bad name and the nearest good one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tinyllm import TinyLLM
from tinyllm.cli_errors import known_classes, nearest


def errors_of(done: Any) -> str:
    assert done.code == 2, done
    assert "Traceback" not in done.err
    assert "--help` lists what is accepted" in done.err
    assert len(done.err.splitlines()) <= 4, done.err
    return done.err


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--model.optimiser.lr", "model.optimizer.lr"),
        ("--model.optimizer.lrr", "model.optimizer.lr"),
        ("--trainer.max_step", "trainer.max_steps"),  # an abbreviation is a misspelling, too
        ("--max_steps", "trainer.max_steps"),
        ("--data.batchsize", "data.batch_size"),
        ("--checkpoint.every_n_train_step", "checkpoint.every_n_train_steps"),
        ("--ckpt", "ckpt_path"),
    ],
)
def test_pitfall_8_a_misspelt_option_names_the_nearest(
    command: Any, tiny: Path, option: str, meant: str
) -> None:
    shown = errors_of(command("fit", "--config", tiny, option, "1"))
    assert f"tinyllm fit: error: unknown key '{option[2:]}'; did you mean '{meant}'?" in shown


@pytest.mark.parametrize(
    ("text", "bad", "meant"),
    [
        ("trainr: {max_steps: 3}", "trainr.max_steps", "trainer.max_steps"),
        ("model: {optimizer: {lrate: 1}}", "model.optimizer.lrate", "model.optimizer.lr"),
        ("data: {cach: x}", "data.cach", "data.cache"),
        ("best_chekpoint: {mode: max}", "best_chekpoint.mode", "best_checkpoint.mode"),
    ],
)
def test_pitfall_8_a_misspelt_key_in_a_file_names_the_nearest(
    command: Any, tiny: Path, tmp_path: Path, text: str, bad: str, meant: str
) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    shown = errors_of(command("fit", "--config", tiny, "--config", "bad.yaml"))
    assert f"error: bad.yaml: unknown key '{bad}'; did you mean '{meant}'?" in shown


BAD_FILES = [
    (
        "more/type.yaml",
        "trainer: {max_steps: many}",
        "trainer.max_steps: expected int, got 'many'",
    ),
    ("more/key.yaml", "trainer: {max: 1}", "unknown key 'trainer.max'"),
    ("dotted.yaml", "trainer.max: 1", "unknown key 'trainer.max'"),
    (
        "syntax.yaml",
        "trainer:\n  max_steps: 1\n   devices: 1\n",
        "Problems parsing config: mapping values",
    ),
    (
        "class.yaml",
        "trainer: {strategy: {class_path: tinyllm.strategies.SyncStrategy, init_args: {back: 1}}}",
        "trainer.strategy: tinyllm.strategies.SyncStrategy has no option 'back'",
    ),
    ("bytes.yaml", b"\xff\xfe", "it is not UTF-8 text: invalid start byte"),
]


@pytest.mark.parametrize(("file", "text", "message"), BAD_FILES)
def test_what_is_wrong_in_a_file_names_the_file(
    command: Any, tiny: Path, tmp_path: Path, file: str, text: str | bytes, message: str
) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "good.yaml").write_text("trainer: {max_steps: 2}")
    (tmp_path / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    configs = ("--config", tiny, "--config", "good.yaml", "--config", file)
    assert f"error: {file}: {message}" in errors_of(command("fit", *configs))
    (tmp_path / "outer.yaml").write_text(f"config: {Path(file).name}")
    (tmp_path / "more" / "outer.yaml").write_text(f"config: {Path(file).name}")
    outer = Path(file).with_name("outer.yaml")
    assert f"error: {file}: {message}" in errors_of(
        command("fit", "--config", tiny, "--config", outer)
    )


def test_what_is_wrong_on_the_command_line_is_in_no_file(
    command: Any, tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.yaml").write_text("trainer: {max: 1}")
    errors_of(command("fit", "--config", tiny, "--config", "bad.yaml"))
    shown = errors_of(command("fit", "--config", tiny, "--trainer.max", "1"))
    assert "error: unknown key 'trainer.max'" in shown


@pytest.mark.parametrize(
    ("name", "bad", "meant"),
    [("prepare", "outt", "output"), ("generate", "temprature", "temperature")],
)
def test_a_misspelt_key_in_a_file_of_another_command(
    command: Any, tmp_path: Path, name: str, bad: str, meant: str
) -> None:
    (tmp_path / "bad.yaml").write_text(f"{bad}: 1")
    shown = errors_of(command(name, "--config", "bad.yaml"))
    assert f"error: bad.yaml: unknown key '{bad}'; did you mean '{meant}'?" in shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "trainer: {strategy: {class_path: tinyllm.strategies.SyncStategy}}",
            "trainer.strategy: there is no class 'tinyllm.strategies.SyncStategy'; did you mean "
            "'tinyllm.strategies.SyncStrategy'?",
        ),
        (
            "trainer: {strategy: {class_path: tinyllm.strategy.DecentralizedStrategy}}",
            "trainer.strategy: there is no class 'tinyllm.strategy.DecentralizedStrategy'; did you "
            "mean 'tinyllm.strategies.DecentralizedStrategy'?",
        ),
        (
            "model: {schedule: {class_path: tinyllm.schedule.WarmUpCosine}}",
            "model.schedule: there is no class 'tinyllm.schedule.WarmUpCosine'; did you mean "
            "'tinyllm.schedule.WarmupCosine'?",
        ),
        (
            "trainer: {callbacks: [{class_path: lightning.pytorch.callbacks.LearningRateMonitr}]}",
            "trainer.callbacks: there is no class "
            "'lightning.pytorch.callbacks.LearningRateMonitr'; did you mean "
            "'lightning.pytorch.callbacks.LearningRateMonitor'?",
        ),
        # callbacks that are imported when they are used
        (
            "trainer: {callbacks: [{class_path: tinyllm.callbacks.ThroughputWindow}]}",
            "trainer.callbacks: there is no class 'tinyllm.callbacks.ThroughputWindow'; did you "
            "mean 'tinyllm.callbacks.ThroughputWindows'?",
        ),
        (
            "trainer: {callbacks: [{class_path: tinyllm.callbacks.RunReprt}]}",
            "did you mean 'tinyllm.callbacks.RunReport'?",
        ),
        ("trainer: {callbacks: [{class_path: RunReprt}]}", "'tinyllm.callbacks.RunReport'?"),
        ("model: {schedule: {class_path: Wsd}}", "did you mean 'tinyllm.schedule.WSD'?"),
    ],
)
def test_pitfall_8_a_misspelt_class_path_names_the_nearest(
    command: Any, tiny: Path, tmp_path: Path, text: str, shown: str
) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    assert shown in errors_of(command("fit", "--config", tiny, "--config", "bad.yaml"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "trainer: {strategy: {class_path: tinyllm.strategies.SyncStrategy, "
            "init_args: {micro_batchsize: 3}}}",
            "trainer.strategy: tinyllm.strategies.SyncStrategy has no option 'micro_batchsize'; "
            "did you mean 'micro_batch_size'?",
        ),
        (
            "model: {schedule: {class_path: tinyllm.schedule.WSD, init_args: {warmup: 0.1}}}",
            "model.schedule: tinyllm.schedule.WSD has no option 'warmup'",
        ),
        ("model: {config: {layer: 3}}", "has no option 'layer'; did you mean 'layers'?"),
    ],
)
def test_pitfall_8_a_misspelt_option_of_a_class_names_the_nearest(
    command: Any, tiny: Path, tmp_path: Path, text: str, shown: str
) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    assert shown in errors_of(command("fit", "--config", tiny, "--config", "bad.yaml"))


def test_an_option_of_a_class_on_the_command_line(command: Any, tiny: Path) -> None:
    shown = errors_of(command("fit", "--config", tiny, "--trainer.strategy.micro_batch", "3"))
    assert "did you mean 'micro_batch_size'?" in shown


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("packed4_acw", "packed4_awc"),
        ("synk", "sync"),
        ("SyncStategy", "tinyllm.strategies.SyncStrategy"),
        ("tinyllm.strategies.DecentralisedStrategy", "tinyllm.strategies.DecentralizedStrategy"),
    ],
)
def test_pitfall_8_a_misspelt_strategy_names_the_nearest(
    command: Any, tiny: Path, given: str, meant: str
) -> None:
    shown = errors_of(command("fit", "--config", tiny, "--trainer.strategy", given))
    assert f"trainer.strategy is '{given}'" in shown
    assert f"did you mean '{meant}'?" in shown


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (["--trainer.max_steps", "many"], "trainer.max_steps: expected int, got 'many'"),
        (["--model.optimizer.lr", "fast"], "model.optimizer.lr: expected float, got 'fast'"),
        (
            ["--data.residency", "hst"],
            "data.residency: 'hst' is not allowed; did you mean 'host'? (choices: auto, host, "
            "device)",
        ),
        (["--config", "nowhere.yaml"], "File does not exist"),
        (["stray"], "unrecognized arguments: stray"),
    ],
)
def test_an_unusable_value_names_its_key(
    command: Any, tiny: Path, args: list[str], shown: str
) -> None:
    assert shown in errors_of(command("fit", "--config", tiny, *args))


DECENTRALIZED = ["--trainer.strategy", "tinyllm.strategies.DecentralizedStrategy"]


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (
            ["--trainer.strategy.backend", "gh20"],
            "trainer.strategy.backend: 'gh20' is not allowed; did you mean 'gh200'? (choices: "
            "auto, gh200, native)",
        ),
        (
            [*DECENTRALIZED, "--trainer.strategy.workers", "x"],
            "trainer.strategy.workers: expected int, got 'x'",
        ),
        (
            [*DECENTRALIZED, "--trainer.strategy.scheme", "atx"],
            "trainer.strategy.scheme: 'atx' is not allowed; did you mean 'atc'? (choices: awc, "
            "atc)",
        ),
        (
            [*DECENTRALIZED, "--trainer.strategy.adaptive_consensus.start_fraction", "x"],
            "trainer.strategy.adaptive_consensus.start_fraction: expected float, got 'x'",
        ),
        (
            [*DECENTRALIZED, "--trainer.strategy.adaptive_consensus.start", "0.5"],
            "trainer.strategy.adaptive_consensus: tinyllm.strategies.consensus.AdaptiveConsensus "
            "has no option 'start'",
        ),
        (
            ["--trainer.strategy.micro_batch_size", "x"],
            "trainer.strategy.micro_batch_size: expected int or null, got 'x'",
        ),
        (["--model.config.layers", "x"], "model.config.layers: expected int, got 'x'"),
        (
            ["--model.schedule.warmup_fraction", "x"],
            "model.schedule.warmup_fraction: expected float, got 'x'",
        ),
        (
            ["--trainer.limit_train_batches", "x"],
            "trainer.limit_train_batches: expected int, float or null, got 'x'",
        ),
        (
            [
                "--trainer.callbacks+=LearningRateMonitor",
                "--trainer.callbacks.logging_interval=epok",
            ],
            "trainer.callbacks.logging_interval: 'epok' is not allowed; did you mean 'epoch'? "
            "(choices: step, epoch, null)",
        ),
    ],
)
def test_a_bad_option_of_a_class_is_one_line(
    command: Any, tiny: Path, args: list[str], shown: str
) -> None:
    err = errors_of(command("fit", "--config", tiny, *args))
    assert f"tinyllm fit: error: {shown}" in err
    assert len(err.splitlines()) == 2


def test_a_missing_key_is_named_as_it_is_given(command: Any) -> None:
    done = command("fit", "--model.preset", "20m")
    assert done.err == (
        "tinyllm fit: error: the following arguments are required: data.cache\n"
        "(`tinyllm fit --help` lists what is accepted)\n"
    )


def test_a_missing_option_of_a_class(command: Any, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(
        "trainer: {strategy: {class_path: tinyllm.strategies.DecentralizedStrategy}}"
    )
    done = command("fit", "--config", tiny, "--config", "bad.yaml")
    assert done.err == (
        "tinyllm fit: error: the following arguments are required: trainer.strategy.workers\n"
        "(`tinyllm fit --help` lists what is accepted)\n"
    )


def test_a_file_that_is_no_yaml(command: Any, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("trainer: [\n")
    done = command("fit", "--config", tiny, "--config", "bad.yaml")
    assert done.code == 2
    assert "Problems parsing config" in done.err


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (["prepare", "--outpt", "x"], "unknown key 'outpt'; did you mean 'output'?"),
        (["prepare", "--output", "x", "--source", "stdlb"], "did you mean 'stdlib'?"),
        (["generate", "--checkpiont", "x"], "unknown key 'checkpiont'; did you mean 'checkpoint'?"),
        (["topology", "ring", "--worker", "3"], "unknown key 'worker'; did you mean 'workers'?"),
    ],
)
def test_pitfall_8_the_commands_around_training(command: Any, args: list[str], shown: str) -> None:
    done = command(*args)
    assert f"tinyllm {args[0]}: error: " in errors_of(done)
    assert shown in done.err


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (
            ["--model.config", "null", "--model.preset", "21m"],
            "preset '21m' is unknown; choose from 20m, 50m, 90m",
        ),
        (["--model.preset", "20m"], "preset '20m' and a config are given; leave one out"),
        (["--model.preset", "21m"], "preset '21m' is unknown; choose from 20m, 50m, 90m"),
        (["--data.batch_size", "0"], "batch_size is 0; it must be at least 1"),
        (["--data.cache", "nowhere"], "no token cache at nowhere"),
        (["--data.context", "17"], "data.context is 17 and the model's context 16"),
        (["--model.config.vocab_size", "100"], "token ids and the model 100"),
        (["--model.optimizer.lr", "-1"], "lr -1.0"),
        (["--trainer.strategy.micro_batch_size", "0"], "error: micro_batch_size is 0"),
        (
            [
                "--trainer.strategy=packed4_awc",
                "--trainer.strategy.adaptive_consensus.start_fraction=2",
            ],
            "error: start_fraction is a share of all updates, from 0 to 1, got 2.0\n",
        ),
        (["--trainer.precision", "bf16-true"], "precision 'bf16-true' is not supported"),
        (["--trainer.gradient_clip_algorithm", "value"], "use gradient_clip_algorithm='norm'"),
        (["--trainer.devices=-1"], "trainer.devices is '-1': "),
        (["--ckpt_path", "nowhere.ckpt"], "there is no checkpoint at nowhere.ckpt"),
    ],
)
def test_what_cannot_be_used_is_exit_code_1_and_no_traceback(
    command: Any, tiny: Path, tmp_path: Path, args: list[str], shown: str
) -> None:
    done = command("fit", "--config", tiny, "--trainer.default_root_dir", "run", *args)
    assert done.code == 1
    assert "tinyllm fit: error: " in done.err
    assert shown in done.err
    assert "Traceback" not in done.err
    assert not list((tmp_path / "run").glob("*"))  # a refused run leaves nothing


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
@pytest.mark.parametrize(
    ("name", "option"),
    [("fit", "trainer.strategy.micro_batch_size"), ("validate", "data.validation_batch_size")],
)
def test_too_little_memory_names_what_needs_less(
    command: Any,
    tiny: Path,
    finished: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    name: str,
    option: str,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    step = "configure_optimizers" if name == "fit" else "validation_step"
    monkeypatch.setattr(TinyLLM, step, fail)
    folder = finished if name == "validate" else "run"
    done = command(name, "--config", tiny, "--trainer.default_root_dir", folder)
    assert done.code == 1
    assert f"{error}\n" in done.err
    assert f"{option} " in done.err


def test_nearest_compares_whole_names_and_last_parts() -> None:
    good = ["trainer.max_steps", "trainer.min_steps", "model.optimizer.lr"]
    assert nearest("trainer.max_stepz", good) == "trainer.max_steps"
    assert nearest("optimiser.lr", good) == "model.optimizer.lr"
    assert nearest("max_steps", good) == "trainer.max_steps"
    assert nearest("Model.Optimizer.LR", good) == nearest("Lr", good) == "model.optimizer.lr"
    assert nearest("zebra", good) is None
    assert nearest("x", []) is None


def test_known_classes_are_named_as_they_are_imported() -> None:
    from lightning.pytorch.strategies import Strategy

    from tinyllm.schedule import Schedule

    assert {"tinyllm.schedule.WSD", "tinyllm.schedule.WarmupCosine"} <= set(known_classes(Schedule))
    names = known_classes(Strategy)
    assert "lightning.pytorch.strategies.DDPStrategy" in names
    assert "lightning.pytorch.strategies.strategy.Strategy" not in names
