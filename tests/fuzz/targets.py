"""All fuzz targets, by name; each draws its input and checks what the library makes of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import targets_acceptance as acceptance
import targets_data as data
import targets_training as training

TARGETS: dict[str, Callable[[Any, Path], None]] = {
    "cache-manifest": data.cache_manifest,
    "cache-shards": data.cache_shards,
    "tokenizer": data.tokenizer,
    "topology-npy": data.topology_npy,
    "topology-csv": data.topology_csv,
    "checkpoint-bytes": training.checkpoint_bytes,
    "checkpoint-content": training.checkpoint_content,
    "checkpoint-pickle": training.checkpoint_pickle,
    "stock-model": training.stock_model,
    "config": training.config,
    "evidence": acceptance.evidence,
    "results": acceptance.results,
    "protocol": acceptance.protocol,
    "tables": acceptance.tables,
    "traces": acceptance.traces,
}
