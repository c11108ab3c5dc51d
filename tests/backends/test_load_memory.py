"""A load takes the shards of its process, the largest tensor, and a constant: never the whole state."""

from pathlib import Path

import pytest
from cases import Case
from memory import RETURN_FREED_MEMORY
from workers import Group, Workers

MIB = 2**20
SLACK = 64 * MIB
# 120 MiB of weights, and AdamW's two moments: half of the state is more than the largest tensor and the slack.
SIZES = {"vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}
ARCHITECTURE = {"model_type": "llama", "num_attention_heads": 8, "max_position_embeddings": 64, **SIZES}
CASE = Case(settings={"model.architecture": ARCHITECTURE})


@pytest.mark.xla
def test_a_load_holds_one_tensor_beside_its_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RETURN_FREED_MEMORY.items():
        monkeypatch.setenv(name, value)
    for group in (Group("native", 2), Group("xla", 2)):
        workers = Workers(group)
        try:
            if not list(tmp_path.iterdir()):
                workers.run("save_untrained", case=CASE, folder=str(tmp_path))
            answers = workers.run("memory_of_a_load", case=CASE, folder=str(tmp_path))
        finally:
            workers.close()
        for answer in answers:
            print(group, {name: round(value / MIB) for name, value in answer.items()})
            assert answer["before"] > 0.9 * answer["shards"], "what was measured holds the shards"
            assert answer["grown"] <= answer["largest"] + SLACK < answer["shards"]
