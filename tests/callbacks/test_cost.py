"""What the callbacks cost the host in a run, between log points and edges."""

from pathlib import Path
from statistics import median

from lightning.pytorch.profilers import SimpleProfiler
from simulation import Batches, batches, new_trainer, tiny

from tinyllm.callbacks import ConsensusDistance, MemoryMonitor, ThroughputWindows, UpdateTrace
from tinyllm.strategies import DecentralizedStrategy

# The shortest update takes 1.3 ms of the GPU, of which Lightning's host work fills a fifth. As long
# as all four together stay within what is left over, the GPU never waits for them; half a percent
# of it (6.5 µs) is allowed to each where it needs the GPU, which only the token count does.
MOST_SECONDS = {
    "ThroughputWindows": 150e-6,
    "MemoryMonitor": 50e-6,
    "ConsensusDistance": 20e-6,
    "UpdateTrace": 20e-6,
}
HOOKS = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end")


def test_a_typical_update_is_hardly_longer(tmp_path: Path) -> None:
    """Medians over a run in which most updates are neither log points nor edges."""
    profiler = SimpleProfiler()
    trainer = new_trainer(
        DecentralizedStrategy(2, compile=False),
        profiler=profiler,
        callbacks=[
            ThroughputWindows(
                tmp_path, warmup_updates=1, windows=1, updates_per_window=50, window_seconds=1e-9
            ),
            MemoryMonitor(tmp_path),
            ConsensusDistance(tmp_path),
            UpdateTrace(tmp_path / "trace", 1),
        ],
        log_every_n_steps=20,
        max_steps=51,
    )
    trainer.fit(tiny(), Batches(batches(2)))
    for name, most in MOST_SECONDS.items():
        seconds = sum(
            median(durations)
            for action, durations in profiler.recorded_durations.items()
            if action.startswith(f"[Callback]{name}") and action.endswith(HOOKS)
        )
        assert 0 < seconds < most, name
