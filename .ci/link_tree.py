"""Lay the package out as links under .typecheck/, for tools that read files instead of importing.

The top-level folders are installed under the one name ``tinyllm`` (``package_dir`` in setup.cfg),
which type checkers and editors cannot see. This builds ``.typecheck/tinyllm/`` with a link for
each of tinyllm's own files and one for each mapped folder, and removes links that went stale.
Standard library only, so any Python runs it.
"""

import configparser
import os
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / ".typecheck"


def package_map() -> dict[str, Path]:
    """Dotted package name -> its folder, as setup.cfg's ``package_dir`` says."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = setup["options"]["package_dir"].strip().splitlines()
    pairs = (line.split("=", maxsplit=1) for line in lines)
    return {name.strip(): ROOT / folder.strip() for name, folder in pairs}


def wanted_links(packages: dict[str, Path]) -> dict[Path, Path]:
    """Link path -> what it points at."""
    links: dict[Path, Path] = {}
    for name, folder in packages.items():
        place = TREE.joinpath(*name.split("."))
        if "." in name:
            links[place] = folder
        else:  # entry by entry, so that the mapped folders fit in beside them
            entries = (e for e in folder.iterdir() if e.name != "__pycache__")
            links.update({place / entry.name: entry for entry in entries})
    return links


def main() -> None:
    """Make the tree agree with setup.cfg; touch nothing that already does."""
    links = wanted_links(package_map())
    for found in TREE.rglob("*"):  # does not descend into linked folders
        if found.is_symlink() and found not in links:
            found.unlink()
    for link, target in links.items():
        relative = os.path.relpath(target, link.parent)
        if link.is_symlink() and os.readlink(link) == relative:  # noqa: PTH115 (as written)
            continue
        if link.is_symlink() or link.is_file():
            link.unlink()
        elif link.is_dir():
            shutil.rmtree(link)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(relative)


if __name__ == "__main__":
    main()
