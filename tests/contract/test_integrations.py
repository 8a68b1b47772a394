"""The examples, run for real with torch's AdamW and with ours: the same losses, logged norms and resumes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.contract.loops import SMALL
from zoff_async import OffloadAdamW, OffloadConfig

EXAMPLES = Path(__file__).parent.parent.parent / "examples"

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # the frameworks' own; ours are looked for by name
    pytest.mark.filterwarnings("error::zoff_async.NonFiniteGradientWarning"),
]


def example(name: str, *packages: str) -> ModuleType:
    """The example as a module; skips the test where what it runs on is not installed."""
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed: pip install {package}")
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_torch(lr, weight_decay):
    return lambda model: torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay, foreach=False)


def plain(lr, weight_decay):
    """Ours without ``model=``."""
    return lambda model: OffloadAdamW(
        model.parameters(), lr=lr, weight_decay=weight_decay, config=OffloadConfig(bucket_bytes=1 << 14, workers=2)
    )


def close_to(expected):
    return [pytest.approx(value, rel=2e-4, abs=1e-6) for value in expected]


def flat(log):
    return [number for entry in log for number in (entry.values() if isinstance(entry, dict) else entry)]


def test_a_nanogpt_like_loop():
    loop = example("nanogpt_loop")
    ours = loop.train(steps=15)

    def plain_torch(model):
        return torch.optim.AdamW(loop.parameter_groups(model, 0.1), lr=loop.LR, betas=(0.9, 0.95), foreach=False)

    assert ours == close_to(loop.train(plain_torch, steps=15))
    assert ours[-1] < ours[0] - 0.5


@pytest.mark.parametrize("gated", [True, False], ids=["model=", "plain"])
def test_a_hugging_face_trainer_trains_clips_saves_and_resumes(gated, tmp_path):
    """Losses and logged grad_norms are those with torch's AdamW, straight through and resumed."""
    trainer = example("hf_trainer", "transformers", "accelerate")
    ours = trainer.on_host if gated else plain(1e-3, 0.01)

    expected = trainer.train(tmp_path / "torch", with_torch(1e-3, 0.01))
    straight = trainer.train(tmp_path / "straight", ours)
    assert [entry.keys() for entry in straight] == [entry.keys() for entry in expected]
    assert flat(straight) == close_to(flat(expected))
    assert {entry["step"] for entry in straight} == set(range(1, 21))

    assert (tmp_path / "straight" / "checkpoint-10" / "optimizer.pt").exists()
    torch.load(tmp_path / "straight" / "checkpoint-10" / "optimizer.pt", weights_only=True)
    for left in (tmp_path / "straight").glob("checkpoint-20"):
        left.rename(tmp_path / "done")
    resumed = trainer.train(tmp_path / "straight", ours, resume=True)
    assert resumed == straight  # not close: the same


@pytest.mark.parametrize("gated", [True, False], ids=["model=", "plain"])
def test_an_accelerate_loop_accumulates_and_clips(gated):
    loop = example("accelerate_loop", "accelerate")
    ours = loop.train(loop.on_host if gated else plain(1e-3, 0.1), steps=10)
    assert flat(ours) == close_to(flat(loop.train(with_torch(1e-3, 0.1), steps=10)))
    assert len(ours) == 10


@pytest.mark.parametrize("gated", [True, False], ids=["model=", "plain"])
def test_a_lightning_fabric_loop_clips_saves_and_loads(gated, tmp_path):
    loop = example("lightning_fabric", "lightning")
    ours = loop.on_host if gated else plain(1e-3, 0.1)
    straight = loop.train(tmp_path, ours, steps=12)
    assert flat(straight) == close_to(flat(loop.train(tmp_path, with_torch(1e-3, 0.1), steps=12)))
    first = loop.train(tmp_path, ours, steps=6)
    rest = loop.train(tmp_path, ours, steps=12, start=6)
    assert first + rest == straight


def test_a_lightning_trainer_with_automatic_optimization(tmp_path):
    """Its closures, gradient clipping, accumulation, schedule and checkpoint."""
    pytest.importorskip("lightning", reason="lightning is not installed: pip install lightning")
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, make):
            super().__init__()
            self.make, self.losses = make, []
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

        def training_step(self, batch, index):
            loss = self.net(batch[0]).square().mean() + (self.net(batch[0]) - 1).abs().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            optimizer = self.make(self)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5), "interval": "step"},
            }

    def run(make):
        torch.manual_seed(1)
        data = torch.utils.data.TensorDataset(torch.randn(64, 8))
        module = Module(make)
        trainer = lightning.Trainer(
            max_steps=8,
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["optimizer_states"][0]["state"]
        return module.losses, [float(values["step"]) for values in saved.values()]

    losses, steps = run(lambda m: OffloadAdamW(m.parameters(), lr=1e-2, config=SMALL))
    expected, expected_steps = run(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False))
    assert losses == close_to(expected)
    assert steps == expected_steps == [8.0] * 4
