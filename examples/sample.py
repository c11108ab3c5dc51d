"""Print text that an exported model writes: `python examples/sample.py runs/demo/export`.

The folder is a plain Hugging Face folder: nothing of portable_fsdp is needed to open it.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch


def sample(folder: str, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    """`prompt` and at most `tokens` tokens after it; the same seed gives the same text."""
    os.environ.setdefault("USE_TORCH_XLA", "0")  # else transformers imports torch_xla wherever it is installed
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    torch.manual_seed(seed)
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        output = model.generate(
            **inputs,
            max_new_tokens=tokens,
            do_sample=True,
            temperature=temperature,
            top_k=0,
        )
    return tokenizer.decode(output[0], skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="an exported model")
    parser.add_argument("--prompt", default="The ")
    parser.add_argument("--tokens", type=int, default=400, help="tokens to write at most")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if not Path(chosen.folder, "config.json").is_file():
        parser.error(
            f"{chosen.folder}: expected an exported model, found no config.json (checkpoint.export=true writes it)"
        )
    print(sample(chosen.folder, chosen.prompt, chosen.tokens, chosen.temperature, chosen.seed))


if __name__ == "__main__":
    main()
