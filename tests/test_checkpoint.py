"""The masters as a safetensors file: whole or not at all, named as the model names them."""

from __future__ import annotations

import sys

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file
from torch import nn

from zoff_async import OffloadAdamW, OffloadConfig
from zoff_async.checkpoint import export_safetensors

SMALL = OffloadConfig(bucket_bytes=200, chunk_numel=17, workers=2)


class Small(nn.Module):
    """A tied head, a frozen layer, a buffer of numbers and one of integers."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.to(dtype)

    def forward(self, tokens):
        return self.head(self.norm(self.frozen(self.embedding(tokens))))


@pytest.fixture
def trained():
    """A bf16 model after three steps, with the last update perhaps in flight."""
    model = Small()
    optimizer = OffloadAdamW(model.named_parameters(), lr=1e-3, model=model, config=SMALL)
    for _ in range(3):
        model(torch.arange(7)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    yield model, optimizer
    optimizer.close()


def test_the_whole_model_is_written_in_fp32(trained, tmp_path):
    """Masters for what is trained, the rest widened; integers stay; the tied weight once."""
    model, optimizer = trained
    export_safetensors(optimizer, tmp_path / "weights.safetensors", model)

    loaded = load_file(tmp_path / "weights.safetensors")
    assert loaded.keys() == model.state_dict().keys() - {"head.weight"}
    assert torch.equal(loaded["embedding.weight"], optimizer.master(model.embedding.weight))
    assert not torch.equal(loaded["embedding.weight"], model.embedding.weight.float())  # more digits than the model has
    assert torch.equal(loaded["frozen.weight"], model.frozen.weight.float())
    assert torch.equal(loaded["norm.running_var"], model.norm.running_var.float())
    assert loaded["norm.num_batches_tracked"].dtype == torch.int64
    floats = {name for name, tensor in loaded.items() if tensor.dtype == torch.float32}
    assert floats == loaded.keys() - {"norm.num_batches_tracked"}


def test_the_file_loads_into_a_model_of_its_own(trained, tmp_path):
    model, optimizer = trained
    export_safetensors(optimizer, tmp_path / "weights.safetensors", model)
    again = Small(torch.float32)
    load_model(again, str(tmp_path / "weights.safetensors"))
    assert again.head.weight is again.embedding.weight
    assert torch.equal(again.embedding.weight, optimizer.master(model.embedding.weight))
    for name, value in again.named_parameters():
        assert torch.equal(value.bfloat16(), dict(model.named_parameters())[name]), name


def test_without_a_model_the_optimizers_own_names_are_used(trained, tmp_path):
    model, optimizer = trained
    export_safetensors(optimizer, str(tmp_path / "weights.safetensors"))
    loaded = load_file(tmp_path / "weights.safetensors")
    assert loaded.keys() == {name for name, _ in model.named_parameters()}
    assert torch.equal(loaded["norm.weight"], optimizer.master(model.norm.weight))


def test_without_names_it_asks_for_the_model(tmp_path):
    model = nn.Linear(3, 2)
    with OffloadAdamW(model.parameters()) as optimizer:
        with pytest.raises(ValueError) as caught:
            export_safetensors(optimizer, tmp_path / "weights.safetensors")
        assert str(caught.value) == (
            "the optimizer was made of parameters without names: pass model=, or make it of model.named_parameters()"
        )
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_file(trained, tmp_path, monkeypatch):
    model, optimizer = trained
    path = tmp_path / "weights.safetensors"
    save_file({"old": torch.ones(2)}, path)

    def half(tensors, filename, metadata):
        with open(filename, "wb") as file:
            file.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", half)
    with pytest.raises(OSError, match="no space left"):
        export_safetensors(optimizer, path, model)
    assert [entry.name for entry in tmp_path.iterdir()] == ["weights.safetensors"]
    assert load_file(path).keys() == {"old"}


def test_a_missing_folder_is_told(trained, tmp_path):
    model, optimizer = trained
    with pytest.raises(Exception, match=r"No such file|not found"):
        export_safetensors(optimizer, tmp_path / "nowhere" / "weights.safetensors", model)


def test_without_the_package_it_says_how_to_get_it(trained, tmp_path, monkeypatch):
    model, optimizer = trained
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError) as caught:
        export_safetensors(optimizer, tmp_path / "weights.safetensors", model)
    assert str(caught.value) == "export_safetensors needs the safetensors package: pip install safetensors"


def test_training_goes_on_after_an_export(trained, tmp_path):
    """The file is a snapshot: later steps do not change it, and it does not disturb them."""
    model, optimizer = trained
    export_safetensors(optimizer, tmp_path / "first.safetensors", model)
    first = load_file(tmp_path / "first.safetensors")
    model(torch.arange(7)).float().square().mean().backward()
    optimizer.step()
    export_safetensors(optimizer, tmp_path / "second.safetensors", model)
    assert torch.equal(load_file(tmp_path / "first.safetensors")["embedding.weight"], first["embedding.weight"])
    assert not torch.equal(load_file(tmp_path / "second.safetensors")["embedding.weight"], first["embedding.weight"])
    assert optimizer.statistics().steps == 4
