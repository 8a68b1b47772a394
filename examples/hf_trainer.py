"""A Hugging Face Trainer with its optimizer on the host: `optimizers=(OffloadAdamW(...), scheduler)`, nothing else.

    pip install zoff-async transformers accelerate
    python examples/hf_trainer.py

Trains a random GPT-2 on Python's own help texts, clips (Trainer's default max_grad_norm), saves, and can resume.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import zoff_async as zoff
from zoff_async.train.text import load_text

CONTEXT = 64


def blocks(count: int) -> list[dict[str, torch.Tensor]]:
    data = load_text(None).data[: count * CONTEXT].long().reshape(count, CONTEXT)
    return [{"input_ids": row, "labels": row} for row in data]


def on_host(model: Any) -> zoff.OffloadAdamW:
    # The one line that changes: with torch it is torch.optim.AdamW of the same arguments without model=.
    return zoff.OffloadAdamW(model.parameters(), lr=1e-3, weight_decay=0.01, model=model)


def train(
    folder: Path, make_optimizer: Callable[[Any], Any] = on_host, steps: int = 20, resume: bool = False
) -> list[dict[str, float]]:
    """Trainer's log: a loss, a grad_norm and a learning rate every step."""
    transformers.set_seed(0)
    config = transformers.GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = make_optimizer(model)
    scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, 2, 20)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_steps=10,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=blocks(400), optimizers=(optimizer, scheduler))
    trainer.train(resume_from_checkpoint=resume)
    return [entry for entry in trainer.state.log_history if "grad_norm" in entry]


if __name__ == "__main__":
    for entry in train(Path(sys.argv[1] if len(sys.argv) > 1 else "build/hf")):
        print(f"step {entry['step']:3.0f}  loss {entry['loss']:.4f}  grad_norm {entry['grad_norm']:.4f}")
