"""A loop written for accelerate; ported_loop.py beside it has one other import. accelerate launch THIS"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from image_classifier import Classifier, Shapes
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def main() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train_rows = DataLoader(Shapes("train"), batch_size=12, shuffle=True)
    test_rows = DataLoader(Shapes("test"), batch_size=12)
    model, optimizer, train_rows, test_rows = accelerator.prepare(model, optimizer, train_rows, test_rows)
    for epoch in range(3):
        model.train()
        for batch in train_rows:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(batch["images"]), batch["labels"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        hits = total = 0
        for batch in test_rows:
            with torch.no_grad():
                guesses = model(batch["images"]).argmax(dim=-1)
            guesses, labels = accelerator.gather_for_metrics((guesses, batch["labels"]))
            hits, total = hits + (guesses == labels).sum().item(), total + len(labels)
        accelerator.print(f"epoch {epoch + 1}: accuracy {hits / total:.3f}")
    accelerator.wait_for_everyone()
    accelerator.save_state("runs/accelerate_loop")


if __name__ == "__main__":
    main()
