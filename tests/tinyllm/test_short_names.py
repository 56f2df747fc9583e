"""Short strategy names: options that follow them, wherever name and options are given."""

from pathlib import Path
from typing import Any

import pytest
from run_files import printed

import tinyllm.strategies.registry  # noqa: F401  (registers the names)
from tinyllm.short_names import class_of, written_out

DECENTRALIZED = "tinyllm.strategies.DecentralizedStrategy"
MEANT = [
    *("--trainer.strategy", DECENTRALIZED),
    *("--trainer.strategy.workers", "4"),
    *("--trainer.strategy.scheme", "atc"),
]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "named": "trainer: {strategy: packed4_atc}",
        "section": "strategy: packed4_atc",
        "options": "trainer: {strategy: {init_args: {topology: ring}}}",
        "class": f"trainer: {{strategy: {{class_path: {DECENTRALIZED}}}}}",
        "other": "model: {optimizer: {lr: 1}}",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(text)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("packed4_atc", (DECENTRALIZED, {"workers": 4, "scheme": "atc"})),
        ("sync", ("tinyllm.strategies.SyncStrategy", {})),
        *(("auto", None), (DECENTRALIZED, None), (None, None), ({}, None)),
    ],
)
def test_what_a_name_stands_for(name: object, meant: object) -> None:
    assert class_of(name) == meant


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["--trainer.strategy", "packed4_atc"], ["--trainer.strategy.topology", "ring"]),
        (["--trainer.strategy=packed4_atc", "--x=1"], ["--trainer.strategy.topology=ring"]),
        (["-c", "named.yaml"], ["--config", "other.yaml", "--trainer.strategy.topology", "ring"]),
        (["--config=named.yaml"], ["--config", "options.yaml"]),
        (["--trainer", "section.yaml"], ["--trainer.strategy.topology", "ring"]),
    ],
)
@pytest.mark.usefixtures("files")
def test_the_class_follows_a_name_whose_options_come_later(
    before: list[str], after: list[str]
) -> None:
    place = 1 if before[-1] == "--x=1" else len(before)
    assert written_out([*before, *after]) == [*before[:place], *MEANT, *before[place:], *after]


@pytest.mark.parametrize(
    "args",
    [
        ["--trainer.strategy", "packed4_atc", "--trainer.max_steps", "3"],
        ["--trainer.strategy", "packed4_acw", "--trainer.strategy.topology", "ring"],
        ["--config", "named.yaml", "--config", "class.yaml", "--trainer.strategy.workers", "2"],
        ["--config", "nowhere.yaml", "--trainer.strategy.topology", "ring"],
        ["--trainer.strategy"],
        [],
    ],
)
@pytest.mark.usefixtures("files")
def test_everything_else_is_left_as_it_is(args: list[str]) -> None:
    assert written_out(args) == args


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("name", [["--trainer.strategy", "packed4_atc"], ["-c", "named.yaml"]])
def test_options_of_a_short_name_are_taken(command: Any, tiny: Path, name: list[str]) -> None:
    options = ["--trainer.strategy.micro_batch_size", "2", "--trainer.strategy.workers", "8"]
    config = printed(command("fit", "-c", tiny, *name, *options, "--print_config"))
    chosen = config["trainer"]["strategy"]
    assert chosen["class_path"] == DECENTRALIZED
    given = {key: chosen["init_args"][key] for key in ("workers", "scheme", "micro_batch_size")}
    assert given == {"workers": 8, "scheme": "atc", "micro_batch_size": 2}


def test_a_short_name_trains_with_options(fit: Any, tmp_path: Path) -> None:
    options = ["--trainer.strategy.compile", "false", "--trainer.strategy.backend", "native"]
    fit("run", "--trainer.strategy", "packed4_awc", *options, "--trainer.max_steps", "2")
    assert "DecentralizedStrategy" in (tmp_path / "run" / "config.yaml").read_text()


def test_a_short_name_as_a_class_path_is_told_what_to_write(
    command: Any, tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.yaml").write_text("trainer: {strategy: {class_path: packed4_atc}}")
    done = command("fit", "--config", tiny, "--config", "bad.yaml")
    assert done.code == 2
    assert (
        f"trainer.strategy: 'packed4_atc' is a short name; as class_path give '{DECENTRALIZED}' "
        "with init_args {'workers': 4, 'scheme': 'atc'}\n"
    ) in done.err


def test_a_misspelt_short_name_with_options_names_the_nearest(command: Any, tiny: Path) -> None:
    args = ["--trainer.strategy", "packed4_acw", "--trainer.strategy.micro_batch_size", "2"]
    done = command("fit", "--config", tiny, *args)
    assert done.code == 2
    assert "did you mean 'packed4_awc'?" in done.err


@pytest.mark.parametrize(
    "name", [["--trainer.strategy", "packed4_atc"], ["--trainer.strategy=sync"]]
)
def test_options_before_their_strategy_are_not_lost(name: list[str]) -> None:
    options = ["--trainer.strategy.micro_batch_size", "4", "--x", "1"]
    found = written_out(["--seed_everything", "3", *options, *name])
    assert found == ["--seed_everything", "3", *written_out([*name, *options])]


def test_of_two_strategies_each_keeps_its_place() -> None:
    args = ["--trainer.strategy.topology", "ring", "--trainer.strategy", "sync"]
    args += ["--trainer.strategy", "auto"]
    assert written_out(args) == args
