import torch

from leap.layers.efficient.sampling import RESOLUTION, draw, pick


def test_each_sample_lies_in_its_own_stretch():
    for _ in range(20):
        place, counts = pick(draw(5), torch.tensor([100]))
        assert (place[0] // 20).tolist() == [0, 1, 2, 3, 4] and counts.all()


def test_every_token_may_be_picked_and_none_beyond():
    drawn = torch.arange(0, RESOLUTION, RESOLUTION // 64)
    picked = {int(pick(d.view(1), torch.tensor([7]))[0]) for d in drawn}
    assert picked == set(range(7))
    assert pick(torch.tensor([RESOLUTION - 1]), torch.tensor([7]))[0].item() == 6


def test_of_few_tokens_each_is_a_sample():
    place, counts = pick(draw(5), torch.tensor([3, 5, 0]))
    assert place[0, :3].tolist() == [0, 1, 2] and counts[0].tolist() == [True] * 3 + [False] * 2
    assert place[1].tolist() == [0, 1, 2, 3, 4] and counts[1].all()
    assert not counts[2].any()
    assert (place < torch.tensor([[3], [5], [1]])).all()
