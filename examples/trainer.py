"""transformers' Trainer on FSDP2 or XLA: a Llama of two layers, from texts that this script makes. Twice, to resume."""

import os
import random
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from portable_fsdp.trainers import on_portable

LENGTH = 32


class SumTrainer(on_portable(Trainer)):
    """A subclass as any other of Trainer's."""


def rows(count: int, seed: int) -> Any:
    """Sums such as `17+25=42`, byte by byte, padded to one length; the loss counts the result alone."""
    draw = random.Random(seed)
    made: list[dict[str, list[int]]] = []
    for _ in range(count):
        left, right = draw.randrange(100), draw.randrange(100)
        question, answer = f"{left}+{right}=".encode(), f"{left + right}\n".encode()
        pads = LENGTH - len(question) - len(answer)
        made.append(
            {
                "input_ids": [*question, *answer, *[0] * pads],
                "labels": [*[-100] * len(question), *answer, *[-100] * pads],
            }
        )
    return made


def main() -> None:
    folder = "runs/trainer"
    os.makedirs(folder, exist_ok=True)
    args = TrainingArguments(
        output_dir=folder,
        max_steps=60,
        per_device_train_batch_size=8,  # rows of each device
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        warmup_steps=6,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=30,
        save_steps=30,
        report_to=[],
        dataloader_pin_memory=False,
    )
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_hidden_layers=2, **sizes))
    trainer = SumTrainer(model=model, args=args, train_dataset=rows(512, seed=0), eval_dataset=rows(64, seed=1))
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    trainer.save_model(f"{folder}/model")  # whole weights, for from_pretrained
    trainer.end()


if __name__ == "__main__":
    main()
