"""A training as the documentation of Hugging Face Accelerate tells to write one; it knows no other library.

Trains, saves its state in the middle of an epoch, trains on; then loads that state and trains the rest once more. The
main process writes what was seen to ``FOLDER/results.json``.
"""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, SAVED_EPOCH, SAVED_BATCH = 3, 1, 4


def make_data(size, seed):
    x = torch.randn(size, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :4].argmax(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mixed_precision", default="bf16")
    args = parser.parse_args()

    accelerator = Accelerator(
        cpu=True,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    set_seed(42)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 4))
    train_dataloader = DataLoader(make_data(75, seed=1), batch_size=4, shuffle=True)
    eval_dataloader = DataLoader(make_data(37, seed=2), batch_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.02, epochs=EPOCHS, steps_per_epoch=len(train_dataloader)
    )
    model, optimizer, train_dataloader, eval_dataloader, scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, scheduler
    )
    loss_function = nn.CrossEntropyLoss()

    def train(epoch, batches, first=0):
        """Each micro-batch: epoch, number, loss over all processes, norm of the gradients or None, learning rate."""
        model.train()
        for step, (inputs, targets) in enumerate(batches, first):
            with accelerator.accumulate(model):
                loss = loss_function(model(inputs), targets)
                accelerator.backward(loss)
                norm = None
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0).item()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            loss = accelerator.reduce(loss.detach(), reduction="mean").item()
            yield epoch, step, loss, norm, scheduler.get_last_lr()[0]

    def evaluate():
        model.eval()
        correct, logits = 0, []
        for inputs, targets in eval_dataloader:
            with torch.no_grad():
                outputs = model(inputs)
            outputs, targets = accelerator.gather_for_metrics((outputs, targets))
            correct += (outputs.argmax(-1) == targets).sum().item()
            logits += outputs.tolist()
        return {"correct": correct, "seen": len(logits), "logits": logits}

    results = {"losses": [], "evaluations": [], "resumed": [], "resumed_evaluations": []}
    for epoch in range(EPOCHS):
        train_dataloader.set_epoch(epoch)
        for found in train(epoch, train_dataloader):
            results["losses"].append(found)
            if found[:2] == (SAVED_EPOCH, SAVED_BATCH - 1):
                accelerator.save_state(args.folder / "state")
        results["evaluations"].append(evaluate())

    accelerator.wait_for_everyone()
    accelerator.load_state(args.folder / "state")
    for epoch in range(SAVED_EPOCH, EPOCHS):
        train_dataloader.set_epoch(epoch)
        batches, first = train_dataloader, 0
        if epoch == SAVED_EPOCH:
            batches, first = accelerator.skip_first_batches(train_dataloader, SAVED_BATCH), SAVED_BATCH
        results["resumed"] += train(epoch, batches, first)
        results["resumed_evaluations"].append(evaluate())

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        results["processes"] = accelerator.num_processes
        (args.folder / "results.json").write_text(json.dumps(results))
    accelerator.end_training()


if __name__ == "__main__":
    main()
