"""The table of recipes, from ``configs/``; a hook of mkdocs."""

import re
from pathlib import Path
from typing import Any

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_COMMAND = re.compile(r"^#\s+(tinyllm fit(?: --config configs/\S+)+)$", re.MULTILINE)
_TIMES = "\N{NO-BREAK SPACE}\N{MULTIPLICATION SIGN}\N{NO-BREAK SPACE}"
_INTRODUCTION = """\
# Recipes

The files of `configs/`, as `tinyllm fit` reads them; files named later lie over the ones before.
Every value can be set on the command line, too. Except for the quickstart, which is for two CPU
cores, all train on 20 targets per parameter, up to whole validations; `wsd.yaml` lies over any of
them.
"""


def _files(text: str) -> list[str]:
    """The files that a recipe's own command names; none if it has no such command."""
    match = _COMMAND.search(text)
    return re.findall(r"configs/(\S+)", match[1]) if match else []


def _merged(below: Any, above: Any) -> Any:
    """One configuration over another, as the command line lays them."""
    if isinstance(below, dict) and isinstance(above, dict):
        return below | {key: _merged(below.get(key), value) for key, value in above.items()}
    return above


def _row(name: str, config: dict[str, Any]) -> str:
    trainer, model, data = config["trainer"], config["model"], config["data"]
    strategy = trainer.get("strategy", {}).get("init_args", {})
    workers = strategy.get("workers", 1)
    rows = [workers, data["batch_size"] // workers] if workers > 1 else [data["batch_size"]]
    batch = _TIMES.join(map(str, [*rows, data["context"]]))
    scheme = strategy.get("scheme", "synchronous") + (
        ", adaptive" if "adaptive_consensus" in strategy else ""
    )
    betas = ", ".join(map(str, model["optimizer"]["betas"]))
    size = model.get("preset") or "own"
    cells = (
        *(name, size, scheme, batch, model["optimizer"]["lr"], betas),
        f"{trainer['max_steps']:,}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def page(configs: Path) -> str:
    """The page of recipes, in Markdown.

    Args:
        configs: The folder with the recipes.
    """
    rows, sections = [], []
    found = {path: path.read_text(encoding="utf-8") for path in sorted(configs.glob("*.yaml"))}
    for path, files in sorted(
        ((path, _files(text)) for path, text in found.items()), key=lambda item: len(item[1])
    ):
        merged: Any = {}
        for file in files:
            merged = _merged(merged, yaml.safe_load(found[configs / file]))
        if files:  # others are for `tinyllm prepare`
            rows.append(_row(f"[{path.stem}](#{path.stem})", merged))
        sections.append(f"## {path.stem}\n\n```yaml\n{found[path].rstrip()}\n```\n")
    table = [
        "| recipe | model | scheme | global batch | peak lr | β1, β2 | updates |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]
    return "\n".join([_INTRODUCTION, *table, "", *sections])


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the page."""
    configs = Path(config.docs_dir).parent / "configs"
    files.append(File.generated(config, "reference/recipes.md", content=page(configs)))
    return files
