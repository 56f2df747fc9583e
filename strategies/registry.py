"""Short names under which the Trainer and configuration files find the strategies."""

from lightning.pytorch.strategies import StrategyRegistry

from tinyllm.strategies.decentralized import DecentralizedStrategy
from tinyllm.strategies.sync import SyncStrategy

__all__ = ["DecentralizedStrategy", "SyncStrategy"]

StrategyRegistry.register("sync", SyncStrategy, description="One model; ranks share each batch")
for workers in (2, 4, 8):
    for scheme in ("awc", "atc"):
        StrategyRegistry.register(
            f"packed{workers}_{scheme}",
            DecentralizedStrategy,
            description=f"{workers} workers on a one-peer exponential graph, {scheme.upper()}",
            workers=workers,
            scheme=scheme,
        )
