import pytest
import torch

from leap.training import now


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_a_device_is_waited_for(device, monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(device.type))
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    before, after = now(torch.device(device)), now(torch.device(device))
    assert waited == ([] if device == "cpu" else [device] * 2)
    assert all(later >= earlier for earlier, later in zip(before, after, strict=True))
