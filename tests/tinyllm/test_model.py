"""The worker-axis Llama against a plain one written here, and its state dict."""

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tinyllm import LlamaConfig
from tinyllm.model import IGNORED, KeyValueCache, Llama, split_rows

CONFIG = LlamaConfig(layers=2, width=24, heads=2, ffn_width=40, vocab_size=31, context=16)


def plain_logits(state: Mapping[str, Tensor], config: LlamaConfig, tokens: Tensor) -> Tensor:
    """A Llama in the plainest terms: stock names, explicit masks, positions by complex numbers."""
    heads, size = config.heads, config.head_dim
    length = tokens.shape[1]
    frequency = config.rope_theta ** (-torch.arange(0, size, 2).double() / size)
    turn = torch.polar(torch.ones(()).double(), torch.arange(length).double()[:, None] * frequency)

    def norm(x: Tensor, name: str) -> Tensor:
        rms = (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt()
        return x / rms * state[f"{name}.weight"]

    def positions(x: Tensor) -> Tensor:  # pairs are (k, k + size/2), as in stock Llama
        pair = torch.complex(x[..., : size // 2], x[..., size // 2 :]) * turn
        return torch.cat((pair.real, pair.imag), dim=-1)

    x = state["embed_tokens.weight"][tokens]
    mask = torch.full((length, length), -torch.inf).triu(1)
    for i in range(config.layers):
        layer = f"layers.{i}"
        h = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            (h @ state[f"{layer}.self_attn.{part}_proj.weight"].T)
            .view(len(tokens), length, heads, size)
            .transpose(1, 2)
            for part in "qkv"
        )
        scores = positions(q) @ positions(k).transpose(2, 3) / size**0.5 + mask
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + y @ state[f"{layer}.self_attn.o_proj.weight"].T
        h = norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (h @ state[f"{layer}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ state[f"{layer}.mlp.down_proj.weight"].T
    return norm(x, "norm") @ state["embed_tokens.weight"].T


def packed(workers: int) -> Llama:
    """Workers with weights of their own, in float64, with scales that are not all 1."""
    model = Llama(CONFIG).double()
    for parameter in model.parameters():
        parameter.data = torch.randn(workers, *parameter.shape[1:]).double() * 0.2 + 0.1
    return model


def worker_state(model: Llama, worker: int) -> dict[str, Tensor]:
    one = Llama(CONFIG).double()
    for mine, all_workers in zip(one.parameters(), model.parameters(), strict=True):
        mine.data = all_workers.data[worker : worker + 1]
    return one.state_dict()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_worker_is_a_plain_llama(workers: int) -> None:
    model = packed(workers)
    tokens = torch.randint(0, 31, (workers, 3, 7))
    logits = model(tokens)
    for worker in range(workers):
        expected = plain_logits(worker_state(model, worker), CONFIG, tokens[worker])
        # tables are fp32, so positions agree to 1e-7
        torch.testing.assert_close(logits[worker], expected, rtol=1e-6, atol=1e-6)


def test_losses_are_sums_over_scored_targets() -> None:
    model = packed(2)
    rows = torch.randint(0, 31, (2, 3, 8))
    rows[0, 1, 4:] = IGNORED
    rows[1, :, :] = IGNORED  # a worker with nothing to predict
    inputs, targets = split_rows(rows)
    nll, scored = model(inputs, targets)
    logp = model(inputs)[0].log_softmax(-1)
    expected = sum(
        -logp[b, t, rows[0, b, t + 1]] for b in range(3) for t in range(7) if b != 1 or t < 3
    )
    assert nll[0].item() == pytest.approx(float(expected), rel=1e-12)
    assert nll[1].item() == 0
    assert scored.tolist() == [17, 0]


def test_gradients_of_workers_do_not_mix() -> None:
    model = packed(3)
    inputs, targets = split_rows(torch.randint(0, 31, (3, 2, 8)))
    model(inputs, targets)[0][1].backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad[1].abs().sum() > 0
        assert parameter.grad[[0, 2]].abs().sum() == 0


def test_state_dict_speaks_stock_names_and_shapes() -> None:
    model = Llama(CONFIG)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    layer = {
        "input_layernorm": (24,),
        "post_attention_layernorm": (24,),
        **{f"self_attn.{part}_proj": (24, 24) for part in "qkvo"},
        "mlp.gate_proj": (40, 24),
        "mlp.up_proj": (40, 24),
        "mlp.down_proj": (24, 40),
    }
    expected = {
        f"layers.{i}.{name}.weight": shape for i in range(2) for name, shape in layer.items()
    }
    assert shapes == expected | {"embed_tokens.weight": (31, 24), "norm.weight": (24,)}


def test_state_dict_is_the_average_and_loads_into_every_worker() -> None:
    model, other = packed(3), packed(2)
    state = model.state_dict()
    key = "layers.1.self_attn.k_proj.weight"
    mean = sum(worker_state(model, worker)[key] for worker in range(3)) / 3
    torch.testing.assert_close(state[key], mean)
    other.load_state_dict(state)
    for worker in range(2):
        for name, tensor in worker_state(other, worker).items():
            assert torch.equal(tensor, state[name])


def test_a_state_dict_of_another_model_is_refused() -> None:
    state = Llama(CONFIG).state_dict()
    del state["layers.0.mlp.up_proj.weight"]
    with pytest.raises(RuntimeError, match="up"):
        Llama(CONFIG).load_state_dict(state)


def test_a_cache_gives_the_logits_of_the_whole_text() -> None:
    model = packed(1)
    tokens = torch.randint(0, 31, (1, 2, 12))
    cache = KeyValueCache()
    parts = [model(tokens[..., :5], cache=cache)]
    parts += [model(tokens[..., t : t + 1], cache=cache) for t in range(5, 12)]
    torch.testing.assert_close(torch.cat(parts, dim=2), model(tokens))
    with pytest.raises(ValueError, match="one at a time"):
        model(tokens[..., :2], cache=cache)


def test_wrong_worker_axis_and_too_long_rows_are_refused() -> None:
    model = Llama(CONFIG)
    with pytest.raises(ValueError, match="tokens hold 2 workers; the model holds 1"):
        model(torch.zeros(2, 1, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="17 tokens exceed the model's context of 16"):
        model(torch.zeros(1, 1, 17, dtype=torch.int64))


def test_initial_weights_follow_init_std_and_the_seed() -> None:
    torch.manual_seed(7)
    first = Llama(CONFIG)
    torch.manual_seed(7)
    second = Llama(CONFIG)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
        if a.ndim > 2:
            assert a.std().item() == pytest.approx(0.02, rel=0.15)
        else:
            assert a.eq(1).all(), name


def test_a_target_outside_the_vocabulary_is_an_error() -> None:
    model = Llama(CONFIG)
    tokens = torch.zeros(1, 1, 4, dtype=torch.int64)
    with pytest.raises((IndexError, RuntimeError)):
        F.cross_entropy(model(tokens)[0, 0], torch.tensor([0, 1, 31, 2]))
    with pytest.raises((IndexError, RuntimeError)):
        model(tokens, torch.full_like(tokens, 31))
