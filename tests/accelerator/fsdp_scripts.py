"""A script as users of Accelerate have it, torchao under FSDP2 with regional compilation: only its import is another.

``fsdp_scripts.py FOLDER [code]`` trains, and the first process leaves the losses in FOLDER/losses.json. With ``code``
the settings are objects, as in Accelerate's guide; without they come from the launch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from acceler8 import Accelerator, verify
from acceler8.utils import AORecipeKwargs, FullyShardedDataParallelPlugin, TorchDynamoPlugin


def main() -> None:
    folder, in_code = Path(sys.argv[1]), len(sys.argv) > 2
    torch.set_num_threads(1)
    if in_code:
        fsdp2_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            cpu_ram_efficient_loading=False,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
        dynamo_plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True)
        kwargs = [AORecipeKwargs(enable_fsdp_float8_all_gather=True)]
        accelerator = Accelerator(
            mixed_precision="fp8", fsdp_plugin=fsdp2_plugin, dynamo_plugin=dynamo_plugin, kwarg_handlers=kwargs
        )
    else:
        accelerator = Accelerator()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    ids = torch.randint(0, 128, (2, 4, 16), generator=torch.Generator().manual_seed(1))[accelerator.process_index]
    losses = []

    def step() -> None:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())

    for _ in range(4):
        step()
    verify(model, optimizer, step=step)
    if accelerator.is_main_process:
        local = model.model.layers[1].mlp.up_proj.weight._local_tensor
        facts = {"losses": losses, "fsdp2": accelerator.is_fsdp2, "type": accelerator.distributed_type.value}
        facts["wrapped"] = type(local).__name__
        (folder / "losses.json").write_text(json.dumps(facts))
    accelerator.end_training()


if __name__ == "__main__":
    main()
