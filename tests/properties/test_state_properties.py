"""State: packed workers as stock Llamas and back, and an engine's state as AdamW's and back."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm import LlamaConfig, TinyLLM
from tinyllm.arena import Arena
from tinyllm.hf import read_model, write_model
from tinyllm.module import parameter_groups
from tinyllm.strategies.engine import Ranks
from tinyllm.strategies.state import EngineState
from tinyllm.strategies.tenant import Tenant

FEWER = settings(max_examples=settings().max_examples // 2)


@st.composite
def configs(draw: st.DrawFn) -> LlamaConfig:
    heads = draw(st.integers(1, 3))
    return LlamaConfig(
        layers=draw(st.integers(1, 2)),
        width=heads * 2 * draw(st.integers(1, 5)),
        heads=heads,
        ffn_width=draw(st.integers(1, 20)),
        vocab_size=draw(st.integers(1, 70)),
        context=draw(st.integers(1, 8)),
    )


class _Engine:
    """What a checkpoint needs of an engine."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.updates, self.pending = 0, False
        self.nll, self.targets = torch.zeros(arena.workers), torch.zeros(arena.workers, dtype=int)


class Packed:
    """Workers of a model in an arena, each with random weights and moments."""

    def __init__(self, config: LlamaConfig, workers: int, seed: int) -> None:
        self.module = TinyLLM(config=config)
        self.tenant = Tenant(self.module, Ranks(workers, workers, 1))
        self.optimizer = torch.optim.AdamW(
            [{"params": p} for p in parameter_groups(self.module.model)], lr=0.5
        )
        self.arena = self.tenant.move_into_arena(self.optimizer.param_groups)
        self.engine: Any = _Engine(self.arena)
        self.state = EngineState(self.engine, self.tenant, Ranks(workers, workers, 1))
        generator = torch.Generator().manual_seed(seed)
        for flat in (self.arena.weights, self.arena.exp_avg, self.arena.exp_avg_sq):
            for view in self.arena.layout.views(flat).values():
                view.copy_(torch.randn(view.shape, generator=generator))

    def save(self) -> dict[str, Any]:
        # as a file would: nothing is shared with what it was saved from
        return torch.utils._pytree.tree_map(
            lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf,
            self.state.save(self.optimizer),
        )


workers_and_seeds = (st.integers(1, 5), st.integers(0, 99))


@FEWER
@given(configs(), *workers_and_seeds)
def test_a_row_as_a_stock_llama_and_back_is_the_row(
    config: LlamaConfig, workers: int, seed: int
) -> None:
    packed = Packed(config, workers, seed)
    for worker in range(workers):
        stock = TinyLLM(config=config)
        for one, many in zip(stock.parameters(), packed.module.parameters(), strict=True):
            one.data = many.data[worker : worker + 1].clone()
        other = Packed(config, 1, seed + 1)
        other.module.load_state_dict(stock.state_dict())
        assert torch.equal(other.arena.weights[0], packed.arena.weights[worker])


@FEWER
@given(configs(), *workers_and_seeds)
def test_while_the_average_is_bound_the_state_dict_is_the_average(
    config: LlamaConfig, workers: int, seed: int
) -> None:
    packed = Packed(config, workers, seed)
    before = packed.arena.weights.clone()
    with packed.tenant.average_bound():
        average = {name: t.clone() for name, t in packed.module.state_dict().items()}
    stock = Packed(config, 1, seed + 1)
    stock.module.load_state_dict(average)
    torch.testing.assert_close(stock.arena.weights[0], before.mean(0))
    assert torch.equal(packed.arena.weights, before)
    assert sum(t.numel() for t in average.values()) == config.num_parameters


@FEWER
@given(configs(), st.integers(0, 99))
def test_a_folder_of_a_stock_llama_gives_the_model_that_was_written(
    tmp_path_factory: pytest.TempPathFactory, config: LlamaConfig, seed: int
) -> None:
    torch.manual_seed(seed)
    module = TinyLLM(config=config)
    folder = tmp_path_factory.mktemp("stock")
    write_model(folder, config, module.state_dict(), None)
    found, weights = read_model(folder)
    assert found == config
    again = TinyLLM(config=config)
    again.load_state_dict(weights)
    assert all(map(torch.equal, again.parameters(), module.parameters()))


@FEWER
@given(configs(), *workers_and_seeds, st.integers(0, 1 << 24), st.booleans())
def test_a_saved_state_loaded_elsewhere_is_the_state(
    config: LlamaConfig, workers: int, seed: int, updates: int, pending: bool
) -> None:
    packed, other = Packed(config, workers, seed), Packed(config, workers, seed + 1)
    packed.engine.updates, packed.engine.pending = updates, pending
    if pending:
        packed.arena.gradients.copy_(packed.arena.weights * 2)
        packed.engine.nll += torch.arange(1.0, workers + 1)
        packed.engine.targets += torch.arange(workers) + 5
    packed.optimizer.param_groups[0]["lr"] = 0.25
    other.module.load_state_dict(packed.module.state_dict())  # of one worker, they are there
    other.state.load(other.optimizer, packed.save(), 0)
    for name in ("weights", "exp_avg", "exp_avg_sq", "gradients"):
        assert torch.equal(getattr(other.arena, name), getattr(packed.arena, name)), name
    assert torch.equal(other.engine.nll, packed.engine.nll)
    assert torch.equal(other.engine.targets, packed.engine.targets)
    assert (other.engine.updates, other.engine.pending) == (updates, pending)
    assert [g["lr"] for g in other.optimizer.param_groups] == [0.25, 0.5]


@FEWER
@given(configs(), st.integers(0, 99))
def test_of_one_worker_plain_adamw_reads_it_and_gives_it_back(
    config: LlamaConfig, seed: int
) -> None:
    packed, other = Packed(config, 1, seed), Packed(config, 1, seed + 1)
    packed.engine.updates = 7
    plain = TinyLLM(config=config)
    optimizer = torch.optim.AdamW([{"params": p} for p in parameter_groups(plain.model)])
    state = packed.save()
    del state["rng"]
    optimizer.load_state_dict(state)
    other.state.load(other.optimizer, optimizer.state_dict(), 0)
    assert torch.equal(other.arena.exp_avg, packed.arena.exp_avg)
    assert torch.equal(other.arena.exp_avg_sq, packed.arena.exp_avg_sq)
    assert other.engine.updates == 7


@FEWER
@given(configs(), st.integers(1, 5), st.integers(1, 5), st.integers(0, 99))
def test_another_number_of_workers_is_refused(
    config: LlamaConfig, workers: int, others: int, seed: int
) -> None:
    if workers == others:
        return
    packed, other = Packed(config, workers, seed), Packed(config, others, seed)
    before = other.arena.weights.clone()
    with pytest.raises(ValueError, match=rf"holds {workers} workers and this run has {others}"):
        other.state.load(other.optimizer, packed.save(), 0)
    assert torch.equal(other.arena.weights, before)
