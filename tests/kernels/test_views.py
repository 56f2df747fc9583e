import torch

from tinyllm.kernels.views import at_even_distances


def test_tensors_of_an_arena_at_even_distances() -> None:
    arena = torch.arange(3 * 40).view(3, 40)
    tensors = [arena[:, start : start + 6].view(3, 2, 3) for start in (4, 14, 24)]
    together = at_even_distances(tensors)
    assert together is not None
    assert torch.equal(together, torch.stack(tensors, 1))
    together[2, 1, 0, 0] = -1
    assert arena[2, 14] == -1


def test_one_tensor_is_at_even_distances() -> None:
    arena = torch.arange(40).view(2, 20)
    together = at_even_distances([arena[:, 3:7]])
    assert together is not None
    assert torch.equal(together, arena[:, None, 3:7])


def test_others_are_not() -> None:
    arena = torch.arange(40).view(2, 20)
    for starts in ((0, 4, 9), (8, 4, 0)):
        assert at_even_distances([arena[:, s : s + 2] for s in starts]) is None
