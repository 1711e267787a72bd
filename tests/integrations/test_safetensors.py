"""Files of safetensors: that library looks for tied weights, and an attached model lies in one memory."""

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


def loaded(path: Path) -> dict[str, torch.Tensor]:
    again = net()
    load_model(again, str(path))
    state: dict[str, torch.Tensor] = again.state_dict()
    return state


def test_save_model_of_an_attached_model_leaves_out_only_what_is_tied(tmp_path: Path) -> None:
    with attached(model := net()):
        save_model(model, str(tmp_path / "whole"))
        held, kept = model.state_dict(), loaded(tmp_path / "whole")
        assert len(load_file(tmp_path / "whole")) == len(held) - 1
        assert all(torch.equal(kept[name], held[name]) for name in held)


def test_load_model_fills_an_attached_model(tmp_path: Path) -> None:
    model, again = net(), net()
    with attached(model):
        pass
    save_model(model, str(tmp_path / "whole"))
    with attached(again):
        load_model(again, str(tmp_path / "whole"))
    held, ended = model.state_dict(), again.state_dict()
    assert all(torch.equal(ended[name], held[name]) for name in held)


def test_save_file_takes_the_full_state_of_an_attached_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    with attached(model) as optimizer:
        save_file(optimizer.full_state_dict(), tmp_path / "full")
        kept, held = load_file(tmp_path / "full"), model.state_dict()
        assert kept.keys() == held.keys()
        assert all(torch.equal(kept[name], held[name]) for name in held)


def test_after_the_end_save_model_is_as_ever(tmp_path: Path) -> None:
    with attached(model := net()):
        pass
    save_model(model, str(tmp_path / "whole"))
    held, kept = model.state_dict(), loaded(tmp_path / "whole")
    assert all(torch.equal(kept[name], held[name]) for name in held)
