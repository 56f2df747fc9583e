"""Comparing traces, on small ones whose distances are known."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tinyllm.acceptance import PROTOCOL_1, TraceError, compare_traces, traces

WORKERS, UPDATES = 2, 5
SHAPES = {"embed.weight": (7, 4), "norm.weight": (4,)}
Tensors = dict[str, np.ndarray[Any, Any]]


def write_trace(folder: Path, change: Callable[[int, Tensors], None] | None = None) -> Path:
    """A trace of seeded numbers; ``change`` may alter the tensors of an update."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    state = {name: rng.normal(size=(WORKERS, *shape)) for name, shape in SHAPES.items()}
    entries = []
    for update in range(UPDATES):
        tensors: Tensors = {}
        for name, before in state.items():
            step = 0.01 * rng.normal(size=before.shape)
            state[name] = before + step
            tensors[f"parameters/{name}"] = state[name]
            tensors[f"updates/{name}"] = step
            for quantity in ("gradients", "exp_avg", "exp_avg_sq"):
                tensors[f"{quantity}/{name}"] = rng.normal(size=before.shape)
        if change is not None:
            change(update, tensors)
        save_file(
            {name: value.astype(np.float32) for name, value in tensors.items()},
            folder / f"update-{update:05d}.safetensors",
        )
        entries.append(
            {
                "update": update,
                "loss": [10.0 + update, 11.0 + update],
                "learning_rate": 1e-3 * (update + 1),
                "rows_sha256": f"rows-{update}",
                "step": update + 1,
            }
        )
    (folder / "trace.json").write_text(json.dumps({"format": 1, "updates": entries}))
    return folder


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Alters a trace's JSON."""
    content = json.loads((folder / "trace.json").read_text())
    change(content)
    (folder / "trace.json").write_text(json.dumps(content))
    return folder


def rewrite(folder: Path, change: Callable[[Tensors], Any], update: int = 0) -> Path:
    """Alters the tensors of one update."""
    path = folder / f"update-{update:05d}.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return folder


def test_equal_traces_are_at_distance_zero(tmp_path: Path) -> None:
    found = compare_traces(
        write_trace(tmp_path / "a"),
        write_trace(tmp_path / "b"),
        workload="w",
        comparison="native/native",
        protocol=PROTOCOL_1.hash,
    )
    rows = found.rows
    assert list(rows["update"]) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert list(rows["worker"]) == [0, 1] * 5
    assert list(rows["loss"][:3]) == [10.0, 11.0, 11.0]
    for quantity in ("gradients", "parameters", "updates", "exp_avg", "exp_avg_sq", "before"):
        assert (rows[quantity] == 0).all()
    for column, value in (("workload", "w"), ("comparison", "native/native")):
        assert set(rows[column]) == {value}
    assert set(rows["protocol"]) == {PROTOCOL_1.hash}
    assert list(rows["rows_sha256"][:3]) == ["rows-0", "rows-0", "rows-1"]


@pytest.mark.parametrize("part", [1, 9, 1 << 14])  # rows: one, two with a last one of one, all
def test_distances_are_those_of_the_definition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    monkeypatch.setattr(traces, "_PART", part)

    def change(update: int, tensors: Tensors) -> None:
        tensors["gradients/embed.weight"][1] *= 1.25
        tensors["exp_avg/norm.weight"] += 0.5

    found = compare_traces(write_trace(tmp_path / "a"), write_trace(tmp_path / "b", change))
    for update in range(UPDATES):
        file = f"update-{update:05d}.safetensors"
        a, b = (load_file(tmp_path / folder / file) for folder in ("a", "b"))
        rows = found.rows[found.rows["update"] == update].set_index("worker")
        for quantity in ("gradients", "exp_avg", "parameters"):
            for worker in range(WORKERS):
                flat = [
                    np.concatenate(
                        [
                            side[f"{quantity}/{name}"][worker].astype(float).ravel()
                            for name in SHAPES
                        ]
                    )
                    for side in (a, b)
                ]
                wanted = np.linalg.norm(flat[1] - flat[0]) / np.linalg.norm(flat[0])
                assert rows.loc[worker, quantity] == pytest.approx(wanted, rel=1e-12)
    details = found.parameters.set_index(["update", "worker", "quantity", "parameter"])
    relative = details["relative_l2"]
    assert relative[2, 1, "gradients", "embed.weight"] == pytest.approx(0.25, rel=1e-6)
    assert relative[2, 0, "gradients", "embed.weight"] == 0
    assert relative[2, 1, "gradients", "norm.weight"] == 0
    assert len(relative) == UPDATES * WORKERS * 5 * 2


def test_parts_are_too_small_to_be_shared_out_among_threads() -> None:
    """OpenBLAS gives a sum of more than 10,000 products to several threads, which wait for another
    longer than they add."""
    for shape in ((1, 32_000, 320), (8, 1_792, 320), (2, 20_000), (4,)):
        sizes = [
            math.prod(shape[1:])
            if part == slice(None)
            else (part.stop - part.start) * math.prod(shape[2:])
            for part in traces._parts(shape)
        ]
        assert max(sizes) <= 10_000
        assert sum(sizes) == math.prod(shape[1:])


def test_another_initial_state_shows(tmp_path: Path) -> None:
    def change(update: int, tensors: Tensors) -> None:
        tensors["parameters/norm.weight"] += 0.01

    found = compare_traces(write_trace(tmp_path / "a"), write_trace(tmp_path / "b", change))
    assert (found.rows["before"] > 1e-3).all()


def test_one_initial_state_is_recognized_through_rounding(tmp_path: Path) -> None:
    def change(update: int, tensors: Tensors) -> None:  # twice as large a first step
        for name in SHAPES:
            tensors[f"parameters/{name}"] = (
                tensors[f"parameters/{name}"] + tensors[f"updates/{name}"]
            )
            tensors[f"updates/{name}"] = 2 * tensors[f"updates/{name}"]

    found = compare_traces(write_trace(tmp_path / "a"), write_trace(tmp_path / "b", change))
    first = found.rows[found.rows["update"] == 0]
    assert (first["updates"] > 0.9).all()
    assert (first["before"] < PROTOCOL_1.initial_state_limit).all()


def test_traces_of_different_rows_are_never_compared(tmp_path: Path) -> None:
    other = write_trace(tmp_path / "b")
    edit(other, lambda content: content["updates"][2].update(rows_sha256="other"))
    rows = compare_traces(write_trace(tmp_path / "a"), other).rows
    assert rows.loc[rows["update"] < 2, "gradients"].notna().all()
    later = rows[rows["update"] >= 2]  # what follows is another trajectory, too
    assert later[["loss", "gradients", "parameters", "updates", "before"]].isna().all(axis=None)
    assert list(later["rows_sha256"][:2]) == ["other", "other"]


def test_what_is_not_finite_stays_visible(tmp_path: Path) -> None:
    def change(update: int, tensors: Tensors) -> None:
        tensors["gradients/norm.weight"][0, 0] = np.nan
        tensors["updates/norm.weight"][1, 0] = np.inf

    rows = compare_traces(write_trace(tmp_path / "a"), write_trace(tmp_path / "b", change)).rows
    assert np.isnan(rows["gradients"][0])
    assert not np.isfinite(rows["updates"][1])


def test_all_zero_gradients_on_both_sides_are_no_agreement(tmp_path: Path) -> None:
    def change(update: int, tensors: Tensors) -> None:
        for name in SHAPES:
            tensors[f"gradients/{name}"] *= 0

    a, b = (write_trace(tmp_path / name, change) for name in "ab")
    assert compare_traces(a, b).rows["gradients"].isna().all()


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (lambda folder: (folder / "trace.json").unlink(), "no readable trace"),
    "no JSON": (lambda folder: (folder / "trace.json").write_text("{"), "no readable trace"),
    "another format": (lambda f: edit(f, lambda c: c.update(format=2)), "format 2"),
    "no updates": (lambda f: edit(f, lambda c: c["updates"].clear()), "lists no update"),
    "no losses": (
        lambda f: edit(f, lambda c: [u.update(loss=[]) for u in c["updates"]]),
        "workers' losses",
    ),
    "fewer updates": (lambda f: edit(f, lambda c: c["updates"].pop()), "4 updates are traced"),
    "a gap": (lambda f: edit(f, lambda c: c["updates"].pop(2)), "not consecutive"),
    "absent file": (
        lambda folder: (folder / "update-00003.safetensors").unlink(),
        "listed but absent: .'update-00003.safetensors'",
    ),
    "other workers": (
        lambda f: edit(f, lambda c: [u["loss"].pop() for u in c["updates"]]),
        "2 workers and .* has 1",
    ),
    "another schedule": (
        lambda f: edit(f, lambda c: c["updates"][1].update(learning_rate=0.5)),
        "learning rates differ: 0.002 at .*, 0.5 at",
    ),
    "truncated file": (
        lambda folder: (folder / "update-00000.safetensors").write_bytes(b"\x00"),
        "cannot read",
    ),
    "missing parameter": (
        lambda f: rewrite(
            f, lambda t: [t.pop(key) for key in list(t) if key.endswith("norm.weight")]
        ),
        r"differ in the names or shapes of \['norm.weight'\]",
    ),
    "missing quantity": (
        lambda f: rewrite(f, lambda t: t.pop("exp_avg/norm.weight")),
        "exp_avg and parameters differ",
    ),
    "no tensors": (lambda f: rewrite(f, lambda t: t.clear()), "no tensors named parameters"),
    "half precision": (
        lambda f: rewrite(
            f, lambda t: t.update({"updates/norm.weight": t["updates/norm.weight"].astype("f2")})
        ),
        "updates/norm.weight is F16",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_unusable_traces_are_refused(tmp_path: Path, name: str) -> None:
    spoil, message = BAD[name]
    a, b = write_trace(tmp_path / "a"), write_trace(tmp_path / "b")
    spoil(b)
    with pytest.raises(TraceError, match=message):
        compare_traces(a, b)


def test_a_trace_is_not_compared_with_itself(tmp_path: Path) -> None:
    folder = write_trace(tmp_path / "a")
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(TraceError, match="with itself"):
        compare_traces(folder, tmp_path / "link")
