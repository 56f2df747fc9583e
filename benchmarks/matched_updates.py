"""Does the gh200 backend make native's updates? The first five of workloads of protocol 1.

Usage: python benchmarks/matched_updates.py RESULTS.csv [WORKLOAD ...]

For each workload three engines start from one state, all workers apart from each other, and see the
same tokens, drawn like words: a few are frequent. After every update each worker of gh200, and of a
second native engine as the control, is compared with the first native one: relative L2 over all
parameters, as the numerical gate measures it. Native is not compiled here, which saves half a
minute for each shape. Adaptive consensus mixes with γ = 0.5. The campaign's scripts do the same
between whole runs; this needs a minute or two for 24 workloads.
"""

import csv
import gc
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinyllm import TinyLLM
from tinyllm.acceptance.configure import Settings, workload_config
from tinyllm.acceptance.protocol import PROTOCOL_1, Workload
from tinyllm.module import parameter_groups
from tinyllm.schedule import WarmupCosine
from tinyllm.strategies.consensus import mixed
from tinyllm.strategies.engine import Combine, Engine, GroupHyperparameters, Ranks
from tinyllm.strategies.gh200 import Gh200Engine
from tinyllm.strategies.gossip import Gossip
from tinyllm.strategies.native import NativeEngine
from tinyllm.strategies.tenant import Tenant
from tinyllm.strategies.topology import make_topology

WORKLOADS = (
    *("20m-sync-b4-c512-clip1", "20m-sync-b8-c1024-clipoff", "20m-sync-b16-c512-clipoff"),
    *("20m-packed4-b4-c512-clipoff", "20m-packed4-b8-c1024-clip1"),
    *("20m-packed8-b4-c512-clip1", "20m-packed8-b8-c1024-clipoff"),
    *("20m-sync-production", "20m-packed4-awc-production", "20m-packed4-atc-production"),
    *("20m-packed4-adaptive-production", "20m-packed8-awc-production"),
    *("20m-accumulate-b32-m8", "20m-accumulate-b11-m4"),
    *("50m-sync-b4-c1024-clip1", "50m-packed4-b4-c512-clip1", "50m-packed4-b8-c512-clipoff"),
    *("50m-packed8-b4-c512-clipoff", "50m-sync-production"),
    *("90m-sync-b4-c512-clipoff", "90m-sync-b8-c1024-clip1", "90m-packed4-b4-c512-clip1"),
    *("90m-packed8-b4-c512-clipoff", "90m-sync-production"),
)
"""Every model, mode, context, clipping, scheme and remainder of the protocol."""

QUANTITIES = ("loss", "gradients", "parameters", "updates", "exp_avg", "exp_avg_sq")
GAMMA = 0.5


class Side:
    """An engine over W workers."""

    def __init__(self, backend: str, workload: Workload) -> None:
        torch.manual_seed(0)
        module = TinyLLM(preset=workload.preset).cuda()
        self.ranks = Ranks(workload.workers, workload.workers, 1)
        tenant = Tenant(module, self.ranks)
        assert tenant.llama is not None
        self.arena = tenant.move_into_arena(
            [{"params": group} for group in parameter_groups(tenant.llama)]
        )
        noise = torch.Generator("cuda").manual_seed(1)
        for view in self.arena.layout.views(self.arena.weights).values():
            view += torch.empty_like(view).normal_(std=0.002, generator=noise)
        micro = workload.micro_batch
        self.engine: Engine
        if backend == "gh200":
            self.engine = Gh200Engine(
                self.arena, tenant.llama, micro_batch_size=micro, ranks=self.ranks
            )
        else:
            self.engine = NativeEngine(
                self.arena,
                tenant.losses(micro),
                collect_gradients=tenant.collect_gradients,
                forward_context=partial(torch.autocast, "cuda", torch.bfloat16),
                ranks=self.ranks,
            )
        self.gossip = Gossip(workload.workers, 0, self.arena.weights)

    def update(
        self,
        rows: Tensor,
        groups: list[GroupHyperparameters],
        clip: float | None,
        scheme: Any,
        matrix: Any,
    ) -> dict[str, Tensor]:
        """What an update did: loss ``[W]``, everything else ``[W, D]``."""
        before = self.arena.weights.clone()
        self.engine.accumulate(rows)
        self.engine.finish_gradients(True)
        gradients = self.arena.gradients.clone()
        combine = None
        if scheme is not None:
            combine = Combine(scheme, matrix, partial(self.gossip.combine, matrix=matrix))
        metrics = self.engine.update(groups, clip, combine)
        arena = self.arena
        return {
            "loss": metrics.loss,
            "gradients": gradients,
            "parameters": arena.weights,
            "updates": arena.weights - before,
            "exp_avg": arena.exp_avg,
            "exp_avg_sq": arena.exp_avg_sq,
        }


def compare(workload: Workload) -> Iterator[dict[str, Any]]:
    """A row for each comparison, update and worker."""
    config = workload_config(workload, Settings(cache=""))
    optimizer = config["model"]["optimizer"]
    schedule = WarmupCosine(**config["model"]["schedule"]["init_args"])
    strategy = config["trainer"]["strategy"]["init_args"]
    gamma = GAMMA if "adaptive_consensus" in strategy else 1.0
    workers = workload.workers
    topology = make_topology("one_peer_exponential", workers) if workers > 1 else None
    sides = {"candidate/native": "gh200", "native/native": "native", "reference": "native"}
    engines = {name: Side(backend, workload) for name, backend in sides.items()}
    rng = np.random.default_rng(0)
    for number in range(PROTOCOL_1.numerical_updates):
        shape = (workers * workload.local_batch, workload.context + 1)
        rows = torch.from_numpy(rng.zipf(1.3, shape) % 32_000).cuda()
        lr = optimizer["lr"] * schedule.factor(number, schedule.updates)
        decays = (optimizer["weight_decay"], 0.0)
        groups = [
            GroupHyperparameters.of({**optimizer, "lr": lr, "weight_decay": decay}, torch.float32)
            for decay in decays
        ]
        matrix = None
        if topology is not None:
            matrix = mixed(topology.matrix(number), gamma)
        found = {
            name: side.update(rows, groups, workload.clip, strategy.get("scheme"), matrix)
            for name, side in engines.items()
        }
        reference = found.pop("reference")
        for name, other in found.items():
            for worker in range(workers):
                a = {q: reference[q][worker] for q in QUANTITIES}
                b = {q: other[q][worker] for q in QUANTITIES}
                yield {
                    "workload": workload.id,
                    "comparison": name,
                    "update": number,
                    "worker": worker,
                    **{q: ((b[q] - a[q]).norm() / a[q].norm()).item() for q in QUANTITIES},
                }
    for side in engines.values():
        side.engine.release()


def main() -> None:
    file, chosen = Path(sys.argv[1]), sys.argv[2:] or WORKLOADS
    limits = {
        "gradients": PROTOCOL_1.gradients_limit,
        "parameters": PROTOCOL_1.parameters_limit,
        "updates": PROTOCOL_1.updates_limit,
    }
    worst: dict[tuple[str, str], float] = {}
    with file.open("w", newline="") as output:
        writer = csv.DictWriter(output, ["workload", "comparison", "update", "worker", *QUANTITIES])
        writer.writeheader()
        for name in chosen:
            for row in compare(PROTOCOL_1.workload(name)):
                writer.writerow(row)
                for quantity in QUANTITIES:
                    key = (row["comparison"], quantity)
                    worst[key] = max(worst.get(key, 0.0), row[quantity])
                    if not row[quantity] < limits.get(quantity, float("inf")):
                        print(f"{name}: {quantity} {row[quantity]:.3g} in {row}")
            output.flush()
            gc.collect()
            torch.cuda.empty_cache()
            print(name, flush=True)
    for (comparison, quantity), value in sorted(worst.items()):
        print(f"{comparison:20}{quantity:12}{value:.2e}  limit {limits.get(quantity, '-')}")


if __name__ == "__main__":
    main()
