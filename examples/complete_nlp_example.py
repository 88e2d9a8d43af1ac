"""nlp_example.py with everything that a long run wants: accumulation, trackers, checkpoints and resuming.

python examples/complete_nlp_example.py --checkpointing_steps 100 --with_tracking --project_dir runs/reviews
python examples/complete_nlp_example.py --project_dir runs/reviews --resume_from_checkpoint runs/reviews/step_100
python examples/complete_nlp_example.py --data mrpc FOLDER     # Microsoft's train.tsv and test.tsv

Model and data: see nlp_example.py. On the CPU a resumed run ends with the weights of one that did not stop, to the bit.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from nlp_data import load_model, make_loaders
from nlp_example import Progress, arguments, evaluate, linear_schedule

from acceler8 import Accelerator


def resume(accelerator: Accelerator, folder: str, loader) -> tuple[int, int, int, object]:
    """Take a checkpoint over: steps made, the epoch, samples of it that were seen, and a loader of what is left."""
    report = accelerator.load_state(folder)
    accelerator.print(report)
    epoch, seen = report.progress["epoch"], report.progress["seen"]
    loader.set_epoch(epoch)
    # A prepared loader goes on where the saved one stood. It cannot with another number of processes, nor if the
    # saved run had skipped batches itself: then they are skipped here.
    if seen and (report.progress["skipped"] or any("loader" in line for line in report.reset)):
        return report.steps, epoch, seen, accelerator.skip_first_batches(loader, seen // loader.total_batch_size)
    return report.steps, epoch, seen, loader


def train(args: argparse.Namespace) -> None:
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        cpu=args.device == "cpu",
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        log_with="all" if args.with_tracking else None,
        project_dir=args.project_dir,
    )
    if args.with_tracking:
        accelerator.init_trackers("complete_nlp_example", {k: str(v) for k, v in vars(args).items()})
    torch.manual_seed(args.seed)
    tokenizer, model = load_model(args.model)
    loader, eval_loader = make_loaders(args, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = linear_schedule(optimizer, args.steps * accelerator.num_processes)
    model, optimizer, loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, eval_loader, scheduler
    )
    step, epoch, seen, left = 0, 0, 0, loader
    if args.resume_from_checkpoint:
        step, epoch, seen, left = resume(accelerator, args.resume_from_checkpoint, loader)

    def save(name: str) -> None:
        folder = Path(args.project_dir) / name
        accelerator.save_state(folder, progress={"epoch": epoch, "seen": seen, "skipped": left is not loader})

    progress = Progress(accelerator, args.steps)
    model.train()
    while step < args.steps:
        losses = []
        for batch in left:
            progress.add(batch)
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            seen += loader.total_batch_size
            if not accelerator.sync_gradients:
                continue  # the step is not complete
            step += 1
            mean = torch.stack(losses).mean()
            losses.clear()
            accelerator.log({"loss": mean, "lr": scheduler.get_last_lr()[0]}, step=step)
            progress.show(step, mean)
            if args.checkpointing_steps.isdigit() and step % max(int(args.checkpointing_steps), 1) == 0:
                save(f"step_{step}")
            if step == args.steps:
                break
        else:  # the epoch is complete
            epoch, seen, left = epoch + 1, 0, loader
            loader.set_epoch(epoch)
        accuracy = evaluate(accelerator, model, eval_loader)
        accelerator.print(f"step {step}, epoch {epoch}: accuracy {accuracy:.2f} %")
        accelerator.log({"accuracy": accuracy}, step=step)
        if args.checkpointing_steps == "epoch" and seen == 0:  # after what draws random numbers
            save(f"epoch_{epoch}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = arguments("Fine-tune a sentence classifier, with checkpoints and trackers.")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--project_dir", default="runs/complete_nlp_example", help="for checkpoints and metrics")
    parser.add_argument("--checkpointing_steps", default="", help="save after so many steps, or after each 'epoch'")
    parser.add_argument("--resume_from_checkpoint", metavar="FOLDER")
    parser.add_argument(
        "--with_tracking", action="store_true", help="metrics.jsonl, and each tracker that is installed"
    )
    args = parser.parse_args()
    if args.checkpointing_steps not in ("", "epoch") and not args.checkpointing_steps.isdigit():
        parser.error(f"--checkpointing_steps got {args.checkpointing_steps!r}; allowed: a number of steps, or epoch")
    train(args)
