"""Says, before a TPU is created, what the run of a config would lack on its workers: an extra, a package, access to a
repository of the hub.

    python -m portable_fsdp.explain --strict --json ... | python launch/tpu_check.py EXTRAS PACKAGES NAMES

EXTRAS: those that are installed, "tpu,data"; PACKAGES: beside them, "gcsfs wandb"; NAMES: of the variables that the run
gets, "HF_TOKEN WANDB_API_KEY". Ends with 2 if something is lacking. tpu_workers.sh starts it.
"""

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
STORES = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "s3a": "s3fs"}
"""Protocol of a URL -> the package that opens it."""
ENGINES = {"tpu": ("xla", "xla_fsdp1"), "torchtpu": ("native",)}


def lacking(explained: dict[str, Any], extras: str, packages: str, names: str) -> Iterator[str]:
    """Yield a sentence for each thing that is lacking."""
    options = {name: option["value"] for name, option in explained["options"].items()}
    [place] = explained["places"]
    base = extras.partition(",")[0]
    if place["device"] != "tpu":
        yield f"--device={place['device']}: workers train on their TPU; leave it out."
    elif place["engine"] not in ENGINES[base]:
        other = next(extra for extra, engines in ENGINES.items() if place["engine"] in engines)
        yield f"--backend={place['engine']} needs TPU_EXTRA={other}; with TPU_EXTRA={base} leave it out."
    mixture = [source for source in options["data.mixture"] or () if isinstance(source, dict)]
    sources = [{"source": options["data.source"], "path": options["data.path"]}, *mixture]
    kinds = {str(source.get("source")) for source in sources}
    needs = {f"data.source={kind}": "data" for kind in sorted(kinds & {"parquet", "huggingface"})}
    needs |= {"model.lora": "lora"} if options["model.lora"] else {}
    yield from missing(needs, "the extra ", "TPU_EXTRA", extras, ",")
    needs = {f"observe.trackers={tracker}": str(tracker) for tracker in options["observe.trackers"] or ()}
    urls = ((key, re.findall(r"\b(gs|gcs|s3|s3a)://", str(value))) for key, value in options.items())
    needs |= {key: STORES[protocol] for key, protocols in urls for protocol in protocols}
    yield from missing(needs, "", "TPU_PACKAGES", packages, " ")
    architecture = options["model.architecture"]
    if isinstance(architecture, str) and not (Path(__file__).parents[1] / architecture).exists():
        yield f"model.architecture={architecture}: expected a file or folder of the checkout, not of the hub."
    token = os.environ["HF_TOKEN"].strip() if "HF_TOKEN" in names.split() else None
    yield from refusals(options, sources, token)


def missing(needs: dict[str, str], kind: str, variable: str, value: str, separator: str) -> Iterator[str]:
    """Yield one sentence about all that `needs` names (option -> extra or package) and `value` doesn't."""
    installed = {plain(name) for name in value.split(separator)}
    absent = {option: name for option, name in needs.items() if plain(name) not in installed}
    if absent:
        reasons = "; ".join(f"{option} needs {kind}{name}" for option, name in absent.items())
        yield f"{reasons}: set {variable}={shlex.quote(separator.join([value, *dict.fromkeys(absent.values())]))}."


def plain(name: str) -> str:
    """comet_ml is comet-ml."""
    return re.sub(r"[-_.]+", "-", name).lower()


def refusals(options: dict[str, Any], sources: list[dict[str, Any]], token: str | None) -> Iterator[str]:
    """Yield a sentence for each repository of the hub that the run names and can't have."""
    repositories = [("model.pretrained", "model", options["model.pretrained"])]
    repositories.append(("model.lora.start_from", "model", (options["model.lora"] or {}).get("start_from")))
    if options["data.tokenizer"] not in ("auto", "bytes"):
        repositories.append(("data.tokenizer", "model", options["data.tokenizer"]))
    repositories += [("data.path", "dataset", s.get("path")) for s in sources if s.get("source") == "huggingface"]
    ids = [each for each in repositories if HUB_ID.fullmatch(str(each[2])) and not os.path.isdir(str(each[2]))]
    if token == "":
        yield "HF_TOKEN is empty."
    elif token and ids and not re.fullmatch("[!-~]+", token):
        yield "HF_TOKEN has spaces or other characters that no token has."
    else:
        for key, kind, name in ids:
            yield from refusal_of_hub(key, kind, str(name).partition("@")[0], token)


def refusal_of_hub(key: str, kind: str, repo: str, token: str | None) -> Iterator[str]:
    """Ask the hub, as a worker would. No answer is no refusal, and named."""
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    except ImportError:
        print(f"{key}: {repo}: not asked whether it is gated: huggingface_hub isn't installed here", file=sys.stderr)
        return
    try:
        HfApi().auth_check(repo, repo_type=kind, token=token or False)
    except Exception as error:  # also of the network; the message of an HTTP library could have the token's header
        if token and getattr(getattr(error, "response", None), "status_code", None) == 401:
            yield "the hub rejects HF_TOKEN (401): set a valid one."
        elif isinstance(error, GatedRepoError | RepositoryNotFoundError):
            problem = "is gated" if isinstance(error, GatedRepoError) else "isn't public, or doesn't exist"
            fix = "your HF_TOKEN has no access to it." if token else "accept its license and add --env=HF_TOKEN."
            yield f"{key}: {repo} {problem}: {fix}"
        else:
            print(f"{key}: {repo}: the hub didn't say whether it is gated ({type(error).__name__})", file=sys.stderr)


if __name__ == "__main__":
    problems = [*dict.fromkeys(lacking(json.load(sys.stdin), *sys.argv[1:]))]
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(2 if problems else 0)
