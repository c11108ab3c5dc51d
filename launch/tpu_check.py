"""Says, before a TPU is created, what the run of a config would lack on its workers: an extra, a package, access to a
repository of the hub.

    python -m portable_fsdp.explain --strict --json ... | python launch/tpu_check.py EXTRAS PACKAGES NAMES

EXTRAS: those that are installed, "tpu,data"; PACKAGES: beside them, "gcsfs wandb"; NAMES: of the variables that the run
gets, "HF_TOKEN WANDB_API_KEY". Ends with 2 if something is lacking. tpu_workers.sh starts it.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

HUB_SOURCES = {"huggingface"}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


def lacking(options: dict[str, Any], extras: str, packages: str, names: str) -> Iterator[str]:
    """Yield a sentence for each thing that is lacking."""
    sources = [
        {"source": options["data.source"], "path": options["data.path"]},
        *(source if isinstance(source, dict) else {} for source in options["data.mixture"] or ()),
    ]
    kinds = {str(source.get("source")) for source in sources}
    needs = {
        "data": [f"data.source={kind}" for kind in sorted(kinds & {"parquet", "huggingface"})],
        "lora": ["model.lora"] if options["model.lora"] else [],
        "adamw8bit": ["optim.name=adamw8bit"] if options["optim.name"] == "adamw8bit" else [],
    }
    for extra, keys in needs.items():
        if keys and extra not in extras.split(","):
            yield f"{keys[0]} needs the extra {extra}: set TPU_EXTRA={extras},{extra}."
    for tracker in options["observe.trackers"] or ():
        if tracker not in packages.split():
            yield f"observe.trackers: {tracker} isn't installed on workers: set TPU_PACKAGES='{packages} {tracker}'."
    repositories = [("model.pretrained", "model", options["model.pretrained"])]
    if options["data.tokenizer"] not in ("auto", "bytes"):
        repositories.append(("data.tokenizer", "model", options["data.tokenizer"]))
    repositories += [("data.path", "dataset", s.get("path")) for s in sources if s.get("source") in HUB_SOURCES]
    for key, kind, name in repositories:
        if name and HUB_ID.fullmatch(str(name)) and not os.path.isdir(str(name)):
            yield from refusal_of_hub(key, kind, str(name).partition("@")[0], "HF_TOKEN" in names.split())


def refusal_of_hub(key: str, kind: str, repo: str, has_token: bool) -> Iterator[str]:
    """Ask the hub, as a worker would. No answer is no refusal, and named."""
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    except ImportError:
        print(f"{key}: {repo}: not asked whether it is gated: huggingface_hub isn't installed here", file=sys.stderr)
        return
    try:
        HfApi().auth_check(repo, repo_type=kind, token=os.environ["HF_TOKEN"] if has_token else False)
    except (GatedRepoError, RepositoryNotFoundError) as error:
        problem = "is gated" if isinstance(error, GatedRepoError) else "isn't public, or doesn't exist"
        fix = "your HF_TOKEN has no access to it." if has_token else "accept its license and add --env=HF_TOKEN."
        yield f"{key}: {repo} {problem}: {fix}"
    except Exception as error:  # of the network; the message of an HTTP library could have the token's header
        print(f"{key}: {repo}: the hub didn't say whether it is gated ({type(error).__name__})", file=sys.stderr)


if __name__ == "__main__":
    options = {name: option["value"] for name, option in json.load(sys.stdin)["options"].items()}
    problems = [*lacking(options, *sys.argv[1:])]
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(2 if problems else 0)
