"""LoRA by peft on a small Llama, as written for accelerate: only the import of Accelerator differs."""

import torch
from accelerate.utils import DataLoaderConfiguration, set_seed
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from portable_fsdp import Accelerator

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
set_seed(0)
text = torch.tensor([*("the quick brown fox jumps over the lazy dog " * 300).encode()])[: 240 * 48].view(240, 48)
sizes = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = get_peft_model(
    LlamaForCausalLM(sizes), LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj", "lm_head"])
)
optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
model, optimizer, rows = accelerator.prepare(
    model, optimizer, DataLoader(TensorDataset(text), batch_size=8, shuffle=True)
)
for step, (ids,) in enumerate(rows, start=1):
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        accelerator.print(f"step {step}: loss {accelerator.reduce(loss.detach(), 'mean').item()}")
if accelerator.is_main_process:
    accelerator.unwrap_model(model).save_pretrained("runs/lora")
