"""Files of safetensors: an attached model lies in one memory, which that library takes for tied weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import offbeat as ob

pytest.importorskip("safetensors", reason="needs safetensors, which comes with transformers")
from safetensors.torch import load_file, load_model, save_file, save_model


def net() -> nn.Module:
    """Its first and its last layer share their weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    return model


def attached(model: nn.Module) -> ob.Attached:
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, ob.wagma())
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    return optimizer


def test_a_file_of_copies_holds_every_tensor_of_an_attached_model(tmp_path: Path) -> None:
    model = net()
    with attached(model) as optimizer:
        optimizer.average()
        save_file({name: value.clone() for name, value in model.state_dict().items()}, tmp_path / "copies")
        kept, held = load_file(tmp_path / "copies"), model.state_dict()
        assert kept.keys() == held.keys()
        assert all(torch.equal(kept[name], held[name]) for name in held)


def test_save_model_refuses_an_attached_model_rather_than_leaving_tensors_out(tmp_path: Path) -> None:
    with attached(model := net()), pytest.raises(RuntimeError, match="None is covering the entire storage"):
        save_model(model, str(tmp_path / "whole"))


def test_after_the_end_save_model_is_as_ever(tmp_path: Path) -> None:
    model, again = net(), net()
    with attached(model):
        pass
    save_model(model, str(tmp_path / "whole"))
    load_model(again, str(tmp_path / "whole"))
    held, loaded = model.state_dict(), again.state_dict()
    assert all(torch.equal(loaded[name], held[name]) for name in held)
