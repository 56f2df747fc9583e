"""Two processes that want one folder: one gets it, the other is told, and nothing is mixed."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_checkout import make_cache, make_checkout
from processes import SECONDS, Command, run
from training import assert_same_run, check_whole, last_logged, write_config

from tinyllm.acceptance.campaign import Campaign
from tinyllm.data import build
from tinyllm.data.cache import TokenCache
from tinyllm.data.manifest import CacheError
from tinyllm.data.prepare import prepare
from tinyllm.folder_lock import FolderInUseError, alone_in

ACCEPTANCE = Path(__file__).resolve().parents[1] / "acceptance"
UPDATES = 60


# --- two runs in one output folder ----------------------------------------------------------------


def test_a_second_run_in_a_folder_is_refused(cache: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yaml", cache, UPDATES)
    whole, folder = tmp_path / "whole", tmp_path / "run"
    fit = ["fit", "--config", config, "--trainer.default_root_dir"]
    alone = run(*fit, whole, log=tmp_path / "whole.log")
    assert alone.wait() == 0, alone.said
    with Command(*fit, folder, log=tmp_path / "first.log") as first:
        first.wait_until(lambda: last_logged(folder) >= 4)
        first.send(signal.SIGSTOP)  # it stays in the middle
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for goes_on in ([], ["--ckpt_path", "last"]):
            second = run(*fit, folder, *goes_on, log=tmp_path / "second.log")
            assert second.wait() == 1
            assert (
                f"error: FolderInUseError: {folder} is in use by another run (process {first.pid} "
                "on "
            ) in second.said
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
        first.send(signal.SIGCONT)
        assert first.wait() == 0, first.said
    assert check_whole(folder) == UPDATES
    assert_same_run(folder, whole)
    again = run(*fit, folder, "--ckpt_path", "last", log=tmp_path / "again.log")
    assert again.wait() == 0, again.said  # the folder is free


def test_a_folder_is_free_after_its_run_however_that_ended(tmp_path: Path) -> None:
    with pytest.raises(KeyError), alone_in(tmp_path):
        raise KeyError
    context = multiprocessing.get_context("fork")
    inside = context.Event()
    holder = context.Process(target=_stay_in, args=(tmp_path, inside))
    holder.start()
    assert inside.wait(60)
    with pytest.raises(FolderInUseError, match=f"process {holder.pid} on"), alone_in(tmp_path):
        pass
    holder.kill()
    holder.join()
    with alone_in(tmp_path):
        assert f"process {os.getpid()} on" in (tmp_path / ".lock").read_text()


def _stay_in(folder: Path, inside: multiprocessing.Event) -> None:  # type: ignore[valid-type]
    with alone_in(folder):
        inside.set()  # type: ignore[attr-defined]
        signal.pause()


# --- two that prepare one cache -------------------------------------------------------------------


def options(tokens: Path, **changes: object) -> list[object]:
    given = {"source": "tokens", "input": tokens, "vocab_size": 64, "boundary_id": 0}
    given |= {"validation_fraction": 0.2, "shard_tokens": 5_000, **changes}
    return ["prepare", *(part for name, value in given.items() for part in (f"--{name}", value))]


@pytest.fixture
def tokens(cache: Path, tmp_path: Path) -> Path:
    """Two hundred thousand tokens."""
    path = tmp_path / "tokens.bin"
    path.write_bytes((cache.parent / "tokens.bin").read_bytes() * 170)
    return path


def test_a_second_prepare_of_a_cache_is_refused(tokens: Path, tmp_path: Path) -> None:
    output, partial = tmp_path / "cache", tmp_path / "cache.partial"
    with Command(*options(tokens), "--output", output, log=tmp_path / "first.log") as first:
        first.wait_until(lambda: (partial / "train-00001.bin").exists())
        first.send(signal.SIGSTOP)
        second = run(*options(tokens), "--output", output, log=tmp_path / "second.log")
        assert second.wait() == 1
        assert f"another `tinyllm prepare` is writing {partial}; wait for it" in second.said
        first.send(signal.SIGCONT)
        assert first.wait() == 0, first.said
    other = run(*options(tokens), "--output", tmp_path / "other", log=tmp_path / "other.log")
    assert other.wait() == 0, other.said
    TokenCache.open(output).verify()
    assert TokenCache.open(output).identity == TokenCache.open(tmp_path / "other").identity
    again = run(*options(tokens), "--output", output, log=tmp_path / "again.log")
    assert "is up to date" in again.said


def test_a_cache_finished_meanwhile_is_not_replaced_unasked(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process finishes it between this one's look at the output and its lock."""
    output = tmp_path / "cache"
    real = build.building

    def slow(path: Path) -> object:
        monkeypatch.setattr(build, "building", real)
        made(tokens, output)
        return real(path)

    monkeypatch.setattr(build, "building", slow)
    with pytest.raises(CacheError, match=r"made with other arguments: shard_tokens was 5000 and"):
        made(tokens, output, shard_tokens=6_000)
    assert TokenCache.open(output).manifest.request["shard_tokens"] == 5_000

    assert {path.name for path in tmp_path.glob("cache*")} == {"cache"}


def test_the_lock_is_of_the_folder_that_is_written_to(tmp_path: Path) -> None:
    """A folder that was opened before another process moved it away locks nothing."""
    output = tmp_path / "cache"
    opened = os.open

    def moving(path: Path, *args: int) -> int:
        descriptor = opened(path, *args)
        if not output.exists():
            build.partial_folder(output).rename(output)
        return descriptor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build.os, "open", moving)
        with build.building(output) as folder:
            assert folder == build.partial_folder(output)
            patch.undo()
            with pytest.raises(CacheError, match="another"), build.building(output):
                pass


def test_an_old_cache_is_not_taken_back_while_it_is_replaced(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its two renames the other process is at work, and has not been killed."""
    output = tmp_path / "cache"
    made(tokens, output)
    rename, looked = Path.rename, []

    def looking(self: Path, target: Path) -> Path:
        if self.name == "cache.partial":
            looked.append(run(*options(tokens), "--output", output, log=tmp_path / "log"))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", looking)
    made(tokens, output, shard_tokens=6_000, overwrite=True)
    (other,) = looked
    assert other.wait() == 1
    assert "another `tinyllm prepare` is writing" in other.said
    assert TokenCache.open(output).manifest.request["shard_tokens"] == 6_000
    assert {path.name for path in tmp_path.glob("cache*")} == {"cache"}


def made(tokens: Path, output: Path, shard_tokens: int = 5_000, **changes: bool) -> TokenCache:
    return prepare(
        output,
        "tokens",
        str(tokens),
        vocab_size=64,
        boundary_id=0,
        validation_fraction=0.2,
        shard_tokens=shard_tokens,
        **changes,
    )


# --- two campaigns on one root --------------------------------------------------------------------

_CAMPAIGN = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from fake_checkout import freeze
from tinyllm.acceptance.campaign import Campaign
root, checkout, cache = map(Path, sys.argv[2:])
print("ready", flush=True)
sys.stdin.readline()
freeze(root, checkout, cache)
campaign = Campaign(root, report=lambda line: None)
found = campaign.run("convergence") + campaign.run("controls")
print(json.dumps(vars(found)))
"""


def test_two_campaigns_on_one_root_share_the_work(tmp_path: Path) -> None:
    """Frozen and worked on at the same moment: each piece is done once, by one of them."""
    checkout, token_cache = make_checkout(tmp_path / "checkout"), make_cache(tmp_path / "cache")
    root = tmp_path / "campaign"
    given = [ACCEPTANCE, root, checkout, token_cache]
    both = [
        subprocess.Popen(
            [sys.executable, "-c", _CAMPAIGN, *map(str, given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in both:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [json.loads(process.communicate(timeout=SECONDS)[0]) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    done = [name for one in said for name in one["done"]]
    expected = [n for kind in ("convergence", "controls") for n in Campaign(root).names(kind)]
    assert sorted(done) == sorted(expected)
    for one in said:
        assert one["failed"] == []
        assert sorted(one["done"] + one["before"] + one["elsewhere"]) == sorted(expected)
    assert sorted(path.name for path in (root / "results").iterdir()) == sorted(expected)
    assert not list((root / "work").iterdir())
    assert not (root / "failed").exists()
