"""Build the sdist and the wheel into dist/: the same bytes from the same commit, wherever and when.

``make dist`` runs it. setuptools takes the time of files in a wheel from SOURCE_DATE_EPOCH, which
is the last commit's here unless it is set, and their modes from the process; an sdist it fills with
the present time, the user's name and the folder's modes, so that one is written anew.
"""

import gzip
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from link_tree import package_map
from setuptools import build_meta

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
FILES = (
    *("setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"),
    "requirements.lock",
)


def commit_time() -> int:
    """Of the last commit, in seconds; 0 where there is none."""
    command = ["git", "log", "-1", "--format=%ct"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 and done.stdout else 0


def normalized(sdist: Path, seconds: int) -> bytes:
    """The same files in an archive that says nothing of who packed it, where or when."""
    packed = io.BytesIO()
    with (
        tarfile.open(sdist) as given,
        gzip.GzipFile(filename="", fileobj=packed, mode="wb", mtime=seconds) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for member in sorted(given.getmembers(), key=lambda member: member.name):
            plain = tarfile.TarInfo(member.name)
            plain.type, plain.size, plain.mtime = member.type, member.size, seconds
            plain.mode = 0o755 if member.isdir() else 0o644
            archive.addfile(plain, given.extractfile(member) if member.isfile() else None)
    return packed.getvalue()


def copied(copy: Path) -> None:
    """Lays out what goes into the archives, and nothing of what else lies in the checkout."""
    for name in FILES:
        shutil.copyfile(ROOT / name, copy / name)
    for folder in {"configs", *(folder.name for folder in package_map().values())}:
        shutil.copytree(
            ROOT / folder,
            copy / folder,
            ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", ".*"),
            copy_function=shutil.copyfile,
        )


def main() -> None:
    """Build both, in a copy of the folder, and put them into dist/."""
    os.umask(0o022)
    seconds = int(os.environ.setdefault("SOURCE_DATE_EPOCH", str(commit_time())))
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "tinyllm"
        copy.mkdir()
        copied(copy)
        os.chdir(copy)
        sdist, wheel = build_meta.build_sdist(scratch), build_meta.build_wheel(scratch)
        DIST.mkdir(exist_ok=True)
        (DIST / sdist).write_bytes(normalized(Path(scratch, sdist), seconds))
        shutil.copy(Path(scratch, wheel), DIST / wheel)
    print(f"{DIST / sdist}\n{DIST / wheel}")


if __name__ == "__main__":
    main()
