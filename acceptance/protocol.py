"""What is measured and what it must reach: every number of a qualification, frozen and hashed.

A protocol's ``hash`` covers all of its content, so rows that carry it say under which numbers they
were measured. Versions 1 and 2 are final: other numbers are another protocol, made with
``dataclasses.replace(PROTOCOL_1, version=0, …)`` and any version but theirs.

Workload ids
    ``{preset}-{mode}-b{local batch}-c{context}-clip1`` or ``…-clipoff``: small batches. Packed
    ones adapt while they combine (AWC).
    ``{preset}-sync-production``, ``{preset}-{mode}-{awc|atc|adaptive}-production``: the recipes as
    they are trained. ``adaptive`` is AWC with adaptive consensus.
    ``{preset}-accumulate-b{global batch}-m{micro-batch}``: sync, context 512, clipped at 1.

The *local batch* is the number of rows of one worker; ``sync`` has one worker, ``packed4`` four and
``packed8`` eight, which mix over a one-peer exponential graph.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import product
from pathlib import Path

from tinyllm.acceptance.json_text import parse_json
from tinyllm.acceptance.power import student_t_quantile

SIDES = ("native", "candidate")
"""What is compared: the backend that is trusted and the one that would replace it."""

KINDS = ("small-batch", "production", "accumulate")
"""What a workload is gated as; accumulation is measured and not gated by speed."""

_WHOLE = ("version", "repeats", "warmup_updates", "windows", "numerical_updates")
_MOST = 1_000  # of anything that is counted; a larger number is a slip
_T_ROUNDING = 5e-4  # t quantiles are written with three decimals
_MODES = {"sync": 1, "packed4": 4, "packed8": 8}
_SCHEMES = ("awc", "atc", "adaptive")

TARGETS_PER_PARAMETER = 20
"""Of a full budget."""

PARAMETERS = {"20m": 20_403_520, "50m": 48_507_392, "90m": 91_605_120}
"""Unique parameters of each preset."""


@dataclass(frozen=True)
class Workload:
    """One training set-up whose updates are timed and compared.

    Attributes:
        id: Its name in all tables.
        kind: ``small-batch``, ``production`` or ``accumulate``; decides which gate applies.
        preset: Size of the model: 20m, 50m or 90m.
        mode: ``sync``, ``packed4`` or ``packed8``; the category of a small batch.
        scheme: How packed workers combine: ``awc``, ``atc`` or ``adaptive``; None for sync.
        workers: N, the number of workers.
        local_batch: Rows of one worker in an update.
        context: Tokens of a row.
        clip: Largest gradient norm of a worker; None leaves gradients as they are.
        micro_batch: Rows of one worker that are computed at a time; None takes them all.
    """

    id: str
    kind: str
    preset: str
    mode: str
    scheme: str | None
    workers: int
    local_batch: int
    context: int
    clip: float | None
    micro_batch: int | None = None

    @property
    def update_tokens(self) -> int:
        """Targets of one update, over all workers."""
        return self.workers * self.local_batch * self.context


@dataclass(frozen=True)
class Recipe:
    """A set-up that is trained on its full budget, once per seed and side.

    Attributes:
        id: Its name in all tables.
        preset: Size of the model.
        mode: ``sync``, ``packed4`` or ``packed8``.
        scheme: How packed workers combine; None for sync.
        workers: N, the number of workers.
        local_batch: Rows of one worker in an update.
        context: Tokens of a row.
        clip: Largest gradient norm of a worker.
        budget_tokens: Training targets. A run ends with the update that crosses or precedes this
            number, so it is off by less than one update.
        seeds: One pair of runs for each.
        t_quantile: One-sided quantile of Student's t with ``len(seeds) - 1`` degrees of freedom.
        assumed_paired_sd: Spread of paired differences, in nats, that the number of seeds was
            chosen for; None where it was not chosen by power.
    """

    id: str
    preset: str
    mode: str
    scheme: str | None
    workers: int
    local_batch: int
    context: int
    clip: float
    budget_tokens: int
    seeds: tuple[int, ...]
    t_quantile: float
    assumed_paired_sd: float | None = None

    @property
    def update_tokens(self) -> int:
        """Targets of one update, over all workers."""
        return self.workers * self.local_batch * self.context


@dataclass(frozen=True)
class Pair:
    """Both sides of a workload, timed one after the other in one allocation."""

    workload: str
    repeat: int
    order: tuple[str, str]

    @property
    def id(self) -> str:
        """Its name: ``{workload}-repeat{repeat}``."""
        return f"{self.workload}-repeat{self.repeat}"


@dataclass(frozen=True)
class ConvergenceRun:
    """A recipe with one seed; either side trains it once."""

    recipe: str
    seed: int

    @property
    def id(self) -> str:
        """Its name: ``{recipe}-seed{seed}``."""
        return f"{self.recipe}-seed{self.seed}"


@dataclass(frozen=True)
class Protocol:
    """Every decision of a qualification.

    Attributes:
        version: 1 and 2 are final; anything else is yours.
        workloads: What is timed and compared, in order.
        recipes: What is trained to the end, in order.
        repeats: Times that each pair is measured, each in an allocation of its own, the sides
            taking turns in going first.
        warmup_updates: Updates before the first window, at least.
        windows: Timed windows of a side; its score is the median of their tokens per second.
        window_seconds: What each window lasts, at least.
        small_batch_ratio: Least median of candidate/native speed over the small batches of a
            category, in each repeat.
        production_ratio: Least candidate/native speed of a production workload, in each repeat.
        numerical_updates: Matched updates that are compared, from one initial state and the same
            rows; trajectories are never realigned.
        initial_state_limit: Two initial states are one if the relative L2 of a worker's parameters
            before the first update is at most this: room for the rounding of stored float32.
        loss_atol: With loss_rtol: |a − b| ≤ atol + rtol · |a| for the losses of each worker.
        loss_rtol: See loss_atol.
        gradients_limit: Relative L2 of a worker's gradients, over all parameters, is below this.
        parameters_limit: The same for its parameters after the update.
        updates_limit: The same for the change that the update made.
        optimizer_rtol: For tests of the optimizer with given gradients, and of consensus alone.
        optimizer_atol: See optimizer_rtol.
        convergence_margin: Upper confidence bounds of the mean difference of final losses,
            candidate − native, are strictly below this, in nats.
        confidence: Of this one-sided bound, ``mean + t · sd / √seeds``.
        power: Probability with which a truly equal candidate should pass, for each recipe; decides
            the number of seeds where ``assumed_paired_sd`` is given.
        threshold_rounding: A value that is this close to a threshold counts as at it, so that
            decimals which binary numbers cannot hold decide nothing.
    """

    version: int
    workloads: tuple[Workload, ...]
    recipes: tuple[Recipe, ...]
    repeats: int = 3
    warmup_updates: int = 20
    windows: int = 5
    window_seconds: float = 1.0
    small_batch_ratio: float = 1.05
    production_ratio: float = 0.98
    numerical_updates: int = 5
    initial_state_limit: float = 1e-6
    loss_atol: float = 0.002
    loss_rtol: float = 0.002
    gradients_limit: float = 0.05
    parameters_limit: float = 0.02
    updates_limit: float = 0.10
    optimizer_rtol: float = 1e-6
    optimizer_atol: float = 1e-8
    convergence_margin: float = 0.005
    confidence: float = 0.95
    power: float = 0.9
    threshold_rounding: float = 1e-12

    def __post_init__(self) -> None:
        numbers = (f.name for f in fields(self) if f.name not in ("workloads", "recipes"))
        for name in numbers:
            value = getattr(self, name)
            usable = isinstance(value, int) if name in _WHOLE else isinstance(value, (int, float))
            if not usable or isinstance(value, bool) or not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a number of at least 0, not {value!r}")
        if min(self.repeats, self.windows, self.numerical_updates) < 1:
            raise ValueError("repeats, windows and numerical_updates must be at least 1")
        if not self.workloads or not self.recipes:
            raise ValueError("a protocol needs at least one workload and one recipe")
        if max(self.repeats, self.windows, self.numerical_updates) > _MOST:
            raise ValueError(f"repeats, windows and numerical_updates must be at most {_MOST}")
        parts: tuple[Workload | Recipe, ...] = (*self.workloads, *self.recipes)
        for part in parts:
            _require_types(part)
            _require_mode(part)
        for workload in self.workloads:
            if workload.kind not in KINDS:
                raise ValueError(f"{workload.id}: kind {workload.kind!r} is none of {KINDS}")
        for recipe in self.recipes:
            if len(set(recipe.seeds)) < max(2, len(recipe.seeds)):
                raise ValueError(
                    f"{recipe.id}: a spread needs two or more seeds, each once, not {recipe.seeds}"
                )
            exact = student_t_quantile(self.confidence, len(recipe.seeds) - 1)
            if abs(recipe.t_quantile - exact) > _T_ROUNDING:
                raise ValueError(
                    f"{recipe.id}: t_quantile is {recipe.t_quantile}; with {len(recipe.seeds)} "
                    f"seeds and a confidence of {self.confidence} it is {exact:.3f}"
                )
        for name, named in (("workload", self.workloads), ("recipe", self.recipes)):
            ids = [part.id for part in named]
            if twice := sorted({i for i in ids if ids.count(i) > 1}):
                raise ValueError(f"each {name} id may occur once; more than once: {twice}")

    @cached_property
    def hash(self) -> str:
        """SHA-256 over all content, as 64 hexadecimal digits."""
        canonical = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def workload(self, workload_id: str) -> Workload:
        """The workload with this id.

        Raises:
            KeyError: If there is none.
        """
        return self._by_id[workload_id]

    @cached_property
    def _by_id(self) -> dict[str, Workload]:
        return {workload.id: workload for workload in self.workloads}

    def pairs(self) -> tuple[Pair, ...]:
        """All pairs to time, one per workload and repeat.

        Which side goes first alternates over a workload's repeats and over the workloads of a
        repeat.
        """
        return tuple(
            Pair(workload.id, repeat, SIDES if (place + repeat) % 2 else (SIDES[1], SIDES[0]))
            for repeat in range(1, self.repeats + 1)
            for place, workload in enumerate(self.workloads)
        )

    def convergence_runs(self) -> tuple[ConvergenceRun, ...]:
        """All runs that each side trains to the end."""
        return tuple(ConvergenceRun(r.id, seed) for r in self.recipes for seed in r.seeds)

    def to_json(self) -> str:
        """All content as readable JSON, for ``Protocol.from_json``."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Protocol":
        """The protocol that ``to_json`` wrote.

        Raises:
            ValueError: If the text is something else, or calls itself version 1 or 2 and differs.
        """
        try:
            content = parse_json(text)
            known = {field.name for field in fields(cls)}
            if unknown := sorted(set(content) - known):
                raise ValueError(f"unknown fields {unknown}")
            if missing := sorted(known - set(content)):
                raise ValueError(f"missing fields {missing}")
            content["workloads"] = tuple(Workload(**w) for w in content["workloads"])
            content["recipes"] = tuple(
                Recipe(**{**r, "seeds": tuple(r["seeds"])}) for r in content["recipes"]
            )
            protocol = cls(**content)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"not a protocol: {error}") from error
        final = PROTOCOLS.get(protocol.version)
        if final is not None and final.hash != protocol.hash:
            raise ValueError(
                f"this protocol calls itself version {protocol.version} and differs from it (hash "
                f"{protocol.hash[:12]}, not {final.hash[:12]}); give it another version"
            )
        return protocol

    @classmethod
    def load(cls, name: str | Path) -> "Protocol":
        """A final version by its number, or a protocol from a JSON file.

        Raises:
            ValueError: If it is neither.
        """
        if str(name).isdecimal():
            version = int(str(name))
            if version not in PROTOCOLS:
                raise ValueError(f"there is no version {version}; choose from {sorted(PROTOCOLS)}")
            return PROTOCOLS[version]
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read the protocol {name}: {error}") from error
        return cls.from_json(text)


def _require_mode(part: Workload | Recipe) -> None:
    """Refuses workers that are not the mode's, and ways to combine that there are not."""
    if _MODES.get(part.mode) != part.workers:
        known = ", ".join(f"{mode} of {workers}" for mode, workers in _MODES.items())
        raise ValueError(f"{part.id!r}: mode {part.mode!r} of {part.workers} is none of {known}")
    schemes = (None,) if part.mode == "sync" else _SCHEMES
    if part.scheme not in schemes:
        raise ValueError(f"{part.id!r}: scheme {part.scheme!r} of {part.mode} is none of {schemes}")


def _require_types(part: Workload | Recipe) -> None:
    """Refuses fields of other types than they are declared with, and sizes that are none."""
    for field in fields(part):
        value, wanted = getattr(part, field.name), field.type
        if field.name == "seeds":
            usable = all(type(seed) is int and seed >= 0 for seed in value)
        elif wanted in (int, int | None):
            usable = (value is None and wanted is not int) or (type(value) is int and value >= 1)
        elif wanted in (float, float | None):
            number = type(value) in (int, float) and 0 <= value < math.inf
            usable = number or (value is None and wanted is not float)
        else:
            usable = isinstance(value, str) or (value is None and wanted is not str)
        if not usable or (field.name == "workers" and value > _MOST):
            raise ValueError(f"{part.id!r}: {field.name} cannot be {value!r}")


def _small_batches() -> Iterable[Workload]:
    sizes = product(("20m", "50m", "90m"), _MODES, (4, 8, 16), (512, 1024), (1.0, None))
    for preset, mode, batch, context, clip in sizes:
        yield Workload(
            id=f"{preset}-{mode}-b{batch}-c{context}-clip{'off' if clip is None else '1'}",
            kind="small-batch",
            preset=preset,
            mode=mode,
            scheme=None if mode == "sync" else "awc",
            workers=_MODES[mode],
            local_batch=batch,
            context=context,
            clip=clip,
        )


def _production() -> Iterable[Workload]:
    for preset, mode, scheme, batch in (
        ("20m", "sync", None, 128),
        ("50m", "sync", None, 32),
        ("90m", "sync", None, 32),
        ("20m", "packed4", "awc", 32),
        ("20m", "packed8", "awc", 16),
        ("20m", "packed4", "atc", 32),
        ("20m", "packed4", "adaptive", 8),
    ):
        yield Workload(
            id="-".join(filter(None, (preset, mode, scheme, "production"))),
            kind="production",
            preset=preset,
            mode=mode,
            scheme=scheme,
            workers=_MODES[mode],
            local_batch=batch,
            context=1024,
            clip=1.0,
        )


def _remainders() -> Iterable[Workload]:
    for batch, micro_batch in ((32, 8), (11, 4)):
        yield Workload(
            id=f"20m-accumulate-b{batch}-m{micro_batch}",
            kind="accumulate",
            preset="20m",
            mode="sync",
            scheme=None,
            workers=1,
            local_batch=batch,
            context=512,
            clip=1.0,
            micro_batch=micro_batch,
        )


_RECIPES = {  # mode, rows of a worker, context
    "sync-production": ("sync", 128, 1024),
    "packed4-production": ("packed4", 32, 1024),
    "packed8-production": ("packed8", 16, 1024),
    "sync-b16-c512": ("sync", 16, 512),
    "packed4-b32-c512": ("packed4", 8, 512),
}
_FIRST_SEED = 45


def _recipes(
    designs: Mapping[str, tuple[int, float]], spreads: Mapping[str, float]
) -> tuple[Recipe, ...]:
    """All recipes, given each one's number of seeds with its t quantile."""
    return tuple(
        Recipe(
            id=name,
            preset="20m",
            mode=mode,
            scheme=None if mode == "sync" else "awc",
            workers=_MODES[mode],
            local_batch=batch,
            context=context,
            clip=1.0,
            budget_tokens=TARGETS_PER_PARAMETER * PARAMETERS["20m"],
            seeds=tuple(range(_FIRST_SEED, _FIRST_SEED + designs[name][0])),
            t_quantile=designs[name][1],
            assumed_paired_sd=spreads.get(name),
        )
        for name, (mode, batch, context) in _RECIPES.items()
    )


_WORKLOADS = (*_small_batches(), *_production(), *_remainders())

PROTOCOL_1 = Protocol(
    version=1,
    workloads=_WORKLOADS,
    recipes=_recipes(dict.fromkeys(_RECIPES, (3, 2.920)), {}),
)
"""The rules of the published GH200 qualification: three seeds for every recipe."""

PROTOCOL_2 = Protocol(
    version=2,
    workloads=_WORKLOADS,
    recipes=_recipes(
        {
            "sync-production": (12, 1.796),
            "packed4-production": (22, 1.721),
            "packed8-production": (4, 2.353),
            "sync-b16-c512": (3, 2.920),
            "packed4-b32-c512": (3, 2.920),
        },
        {
            "sync-production": 0.00543,
            "packed4-production": 0.00766,
            "packed8-production": 0.00243,
            "sync-b16-c512": 0.000691,
            "packed4-b32-c512": 0.00159,
        },
    ),
)
"""Version 1 with as many seeds as a truly equal candidate needs to pass each recipe with 0.9.

The spreads are those of the differences published for version 1, rounded up at the third digit:
three pairs each, so estimates that a native/native spread of your own should replace.
"""

PROTOCOLS = {protocol.version: protocol for protocol in (PROTOCOL_1, PROTOCOL_2)}
"""The final versions."""
