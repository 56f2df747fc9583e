"""The site, built once for all tests and all of pytest-xdist's workers."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

# for the helper modules of this folder, and for the tools that build the site
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "docs" / "tools")]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The site as ``make docs`` builds it, a ``built_site.Site``."""
    from built_site import Site

    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder, log = shared / "site", shared / "site.log"
    with FileLock(shared / "site.lock"):
        if not log.exists():
            subprocess.run([sys.executable, ".ci/link_tree.py"], cwd=ROOT, check=True)
            done = subprocess.run(
                [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
                cwd=ROOT,
                env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
            log.write_text(f"{done.returncode}\n{done.stdout}{done.stderr}", encoding="utf-8")
    code, _, text = log.read_text(encoding="utf-8").partition("\n")
    return Site(folder, text, int(code))
