"""The page of commands, from what ``tinyllm COMMAND --help`` prints; a hook of mkdocs."""

import json
import os
import subprocess
import sys
from functools import cache

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

_WIDTH = "84"
_TRAINING = "\nmodel: what is trained"  # where the options begin that all of these share
_AS_FIT = ("validate", "test", "predict")
_INTRODUCTION = """\
# Commands

What `tinyllm COMMAND --help` prints. How options, files and checkpoints go over each other is told
in [Train and configure](../guides/training.md#what-wins).
"""
# In one process, so that what they share is imported once.
_PRINT = """
import contextlib, io, json
from tinyllm.cli import COMMANDS, main
texts = {}
for name in COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main([name, "--help"])
    texts[name] = [COMMANDS[name].summary, out.getvalue().replace(" \\b", "")]
print(json.dumps(texts))
"""


@cache
def _help() -> dict[str, tuple[str, str]]:
    """Each command's summary and help."""
    done = subprocess.run(
        [sys.executable, "-c", _PRINT],
        env=os.environ | {"COLUMNS": _WIDTH},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise PluginError(f"tinyllm --help failed:\n{done.stderr}")
    texts: dict[str, tuple[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return texts


def page() -> str:
    """The page in Markdown."""
    parts = [_INTRODUCTION]
    for name, (summary, text) in _help().items():
        parts.append(f"## tinyllm {name} {{ #{name} }}\n\n{summary}\n")
        if name in _AS_FIT:
            text = text.partition(_TRAINING)[0]
        parts.append(f"```text\n{text.strip()}\n```\n")
        if name in _AS_FIT:
            parts.append("The other options are those of [`tinyllm fit`](#fit).\n")
    return "\n".join(parts)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the page."""
    files.append(File.generated(config, "reference/commands.md", content=page()))
    return files
