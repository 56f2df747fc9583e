"""Hostile campaigns: frozen evidence, results, tables and traces."""

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pandas as pd
from campaign_tables import SMALL, convergence_rows, numerical_rows, performance_rows
from contract import REFUSED, answer, command, write_json
from hypothesis import strategies as st
from mutations import changed_bytes, changed_values
from safetensors.numpy import load_file, save_file

from tinyllm.acceptance import TraceError, Verdict, compare_traces, numerical_gate
from tinyllm.acceptance.accept import EXIT_CODES
from tinyllm.acceptance.collect import collect
from tinyllm.acceptance.evidence import (
    EvidenceError,
    freeze_candidate,
    freeze_manifest,
    hash_tree,
    identity_of,
    verify_all,
    write_receipt,
)
from tinyllm.acceptance.measure import job_name
from tinyllm.acceptance.protocol import Protocol
from tinyllm.acceptance.runs import read_result
from tinyllm.acceptance.seals import sealed_json
from tinyllm.acceptance.traces import QUANTITIES


@cache
def good_campaign() -> tuple[Path, str]:
    """A frozen campaign with a candidate, a receipt, a result and tables; the candidate's id."""
    base = Path(mkdtemp())
    (base / "tree" / "tinyllm").mkdir(parents=True)
    (base / "tree" / "tinyllm" / "model.py").write_text("LAYERS = 8\n", encoding="utf-8")
    (base / "tree" / "requirements.lock").write_text("torch==2.13.0\n", encoding="utf-8")
    root, files = base / "campaign", ["tinyllm/model.py"]
    freeze_manifest(
        root,
        SMALL,
        configs={part.id: {"seed": 45} for part in (*SMALL.workloads, *SMALL.recipes)},
        base=base / "tree",
        files=files,
        lockfile=base / "tree" / "requirements.lock",
        token_cache="cache-1",
    )
    frozen = freeze_candidate(root, base=base / "tree", files=files, details={"backend": "gh200"})
    write_receipt(root, "environment", {"torch": "2.13.0"})
    result = root / "results" / job_name(frozen.id, "numerical", SMALL.workloads[0].id)
    result.mkdir(parents=True)
    made = {"manifest": verify_all(root).identity, "candidate": frozen.identity}
    first = numerical_rows(SMALL).query("workload == @SMALL.workloads[0].id")
    rows = first.to_dict("records")
    (result / "result.json").write_bytes(
        sealed_json({**made, "rows": rows, "inputs": {}, "curve": []})
    )
    collect(root, frozen.id)
    return root, frozen.id


def _resigned(value: Any, key: str) -> Any:
    """The document with the hash that its changed content has."""
    if not isinstance(value, dict):
        return value
    try:
        return {**value, key: identity_of({k: v for k, v in value.items() if k != key})}
    except ValueError:
        return value


def _replaced(path: Path, data: Any, key: str = "identity") -> None:
    """Changes a file's bytes, or its JSON and perhaps the hash in it."""
    path.chmod(0o644)
    if path.suffix != ".json" or data.draw(st.booleans(), label="as bytes"):
        path.write_bytes(data.draw(changed_bytes(path.read_bytes())))
        return
    value = data.draw(changed_values(json.loads(path.read_text(encoding="utf-8"))))
    signed = data.draw(st.booleans(), label="signed")
    write_json(path, _resigned(value, key) if signed else value)


def evidence(data: Any, folder: Path) -> None:
    """Every byte of a frozen campaign counts, and a forged manifest reads nothing elsewhere."""
    good, candidate = good_campaign()
    root = shutil.copytree(good, folder / "campaign")
    names = sorted(p.relative_to(good).as_posix() for p in good.rglob("*") if p.is_file())
    frozen = [n for n in names if not n.startswith(("receipts", "results", "qualifications"))]
    name = data.draw(
        st.sampled_from(["manifest.json", f"candidates/{candidate}/candidate.json", *frozen])
    )
    _replaced(root / name, data)
    found = answer(lambda: verify_all(root), (EvidenceError,), root)
    if found is not REFUSED:
        before = verify_all(good)
        assert found.source == hash_tree(root / "native")
        assert found.protocol == before.protocol
        if found.identity == before.identity:
            assert found == before
    done = command("accept", root)
    assert done.code == 2, done  # nothing but one table has been measured
    assert done.err.strip() or "verdict:" in done.out
    answer(lambda: collect(root, candidate), (EvidenceError,), root)


def results(data: Any, folder: Path) -> None:
    """A damaged result is refused, and never collected into tables."""
    good, candidate = good_campaign()
    root = shutil.copytree(good, folder / "campaign")
    name = job_name(candidate, "numerical", SMALL.workloads[0].id)
    path = root / "results" / name / "result.json"
    _replaced(path, data, "seal")
    answer(lambda: read_result(root, name), (EvidenceError,), path)
    if answer(lambda: collect(root, candidate), (EvidenceError,), name) is not REFUSED:
        assert command("accept", root).code == 2


def protocol(data: Any, folder: Path) -> None:
    """A protocol that loads says of itself what it is, and can be written and read again."""
    path = folder / "protocol.json"
    path.write_text(SMALL.to_json(), encoding="utf-8")
    if data.draw(st.booleans(), label="as bytes"):
        path.write_bytes(data.draw(changed_bytes(path.read_bytes())))
    else:
        write_json(path, data.draw(changed_values(json.loads(SMALL.to_json()))))
    found = answer(lambda: Protocol.load(path), (ValueError,), "protocol")
    performance_rows(SMALL).to_csv(folder / "performance.csv", index=False)
    numerical_rows(SMALL).to_csv(folder / "numerical.csv", index=False)
    convergence_rows(SMALL).to_csv(folder / "convergence.csv", index=False)
    done = command("accept", folder)
    if isinstance(found, Protocol):
        assert Protocol.from_json(found.to_json()) == found
        assert (done.code == 0) == (found.hash == SMALL.hash), "rows of another protocol passed"
    else:
        assert done.code == 2


TABLES = {
    "performance": performance_rows,
    "numerical": numerical_rows,
    "convergence": convergence_rows,
}


@cache
def good_table(name: str) -> bytes:
    return TABLES[name](SMALL).to_csv(index=False).encode()


def tables(data: Any, folder: Path) -> None:
    """Damaged tables get a verdict; a pass only if each row that is needed is there once."""
    (folder / "protocol.json").write_text(SMALL.to_json(), encoding="utf-8")
    for name in TABLES:
        (folder / f"{name}.csv").write_bytes(good_table(name))
    name = data.draw(st.sampled_from(sorted(TABLES)))
    (folder / f"{name}.csv").write_bytes(data.draw(changed_bytes(good_table(name))))
    done = command("accept", folder, "--json")
    found = json.loads(done.out)
    assert done.code == EXIT_CODES[Verdict(found["verdict"])]
    if found["verdict"] == "pass":
        key = {
            "performance": ["workload", "repeat", "side"],
            "numerical": ["workload", "comparison", "update", "worker"],
            "convergence": ["recipe", "seed", "side"],
        }[name]
        rows = pd.read_csv(folder / f"{name}.csv", dtype={"protocol": str})
        good = TABLES[name](SMALL)
        strip = rows[key].map(lambda cell: cell.strip() if isinstance(cell, str) else cell)
        assert sorted(map(tuple, strip.to_numpy())) == sorted(map(tuple, good[key].to_numpy()))
        assert set(rows["protocol"].str.strip()) == {SMALL.hash}
    else:
        assert any(gate["messages"] for gate in found["gates"].values())


# --- traces -----------------------------------------------------------------------------------

SHAPES = {"embed.weight": (7, 4), "norm.weight": (4,)}


@cache
def good_trace() -> Path:
    """Two updates of two workers."""
    folder, rng = Path(mkdtemp()), np.random.default_rng(0)
    for update in range(2):
        values = {
            f"{quantity}/{name}": rng.normal(size=(2, *shape)).astype(np.float32)
            for quantity in QUANTITIES
            for name, shape in SHAPES.items()
        }
        save_file(values, folder / f"update-{update:05d}.safetensors")
    entries = [
        {"update": u, "loss": [10.0, 11.0], "learning_rate": 1e-3, "rows_sha256": f"rows-{u}"}
        for u in range(2)
    ]
    write_json(folder / "trace.json", {"format": 1, "updates": entries})
    return folder


def traces(data: Any, folder: Path) -> None:
    """A damaged trace is refused, or its distances are those of the numbers in its files."""
    other = shutil.copytree(good_trace(), folder / "trace")
    path = data.draw(st.sampled_from(sorted(other.iterdir())))
    _replaced(path, data)
    found = answer(
        lambda: compare_traces(good_trace(), other, workload="w", updates=2), (TraceError,), other
    )
    if found is REFUSED:
        return
    assert numerical_gate(found.rows, SMALL).verdict == "failed"  # it has no such workload
    same_rows = True
    for update, rows in found.rows.groupby("update"):
        a, b = (load_file(f / f"update-{update:05d}.safetensors") for f in (good_trace(), other))
        same_rows = same_rows and (rows["rows_sha256"] == f"rows-{update}").all()
        for row in rows.to_dict("records"):
            for quantity in QUANTITIES:
                names = [f"{quantity}/{name}" for name in SHAPES]
                one, two = (
                    np.concatenate([t[name][row["worker"]].ravel() for name in names]).astype(float)
                    for t in (a, b)
                )
                with np.errstate(all="ignore"):
                    wanted = np.sqrt(((two - one) ** 2).sum() / (one**2).sum())
                wanted = wanted if same_rows else np.nan
                np.testing.assert_allclose(row[quantity], wanted, rtol=1e-9, atol=1e-12)
