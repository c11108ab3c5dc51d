"""trl's SFTTrainer on FSDP2 or XLA: a Llama of two layers and a tokenizer that this script makes. Twice, to resume."""

import random
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from portable_fsdp.trainers import on_portable


class SumTrainer(on_portable(SFTTrainer)):
    """A subclass as any other of SFTTrainer's."""


def rows(count: int, seed: int) -> Dataset:
    """Sums such as `17+25=42`; the loss counts the result alone."""
    draw = random.Random(seed)
    pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(count)]
    return Dataset.from_list([{"prompt": f"{left}+{right}=", "completion": str(left + right)} for left, right in pairs])


def main() -> None:
    folder = "runs/sft"
    letters = {letter: number for number, letter in enumerate(["<pad>", "<eos>", *"0123456789+="])}
    tokens = Tokenizer(models.WordLevel(letters, unk_token="<pad>"))
    tokens.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # a token for each letter
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>")
    # One length of all rows: XLA compiles a program for each. trl's default is bf16=True.
    settings: dict[str, Any] = {"max_length": 16, "pad_to_multiple_of": 16, "bf16": False, "learning_rate": 3e-3}
    settings |= {"max_steps": 60, "logging_steps": 10, "save_steps": 30, "eval_strategy": "steps", "eval_steps": 30}
    args = SFTConfig(output_dir=folder, report_to=[], dataloader_pin_memory=False, **settings)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(letters), num_hidden_layers=2, **sizes))
    data: dict[str, Any] = {"train_dataset": rows(512, seed=0), "eval_dataset": rows(64, seed=1)}
    trainer: Any = SumTrainer(model=model, args=args, processing_class=tokenizer, **data)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    trainer.end()


if __name__ == "__main__":
    main()
