"""Templates that are no scripts: JobSets against their schema, SkyPilot's keys, Dockerfiles against pyproject.toml."""

import json
import math
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from cli import ROOT
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from portable_fsdp.config.load import load_config

LAUNCH = ROOT / "launch"
JOBSETS = sorted(LAUNCH.glob("gke_jobset_*.yaml"))
SKY_TASKS = sorted(LAUNCH.glob("skypilot_*.yaml"))
DOCKERFILES = sorted(LAUNCH.glob("Dockerfile.*"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


# ---------------------------------------------------------------------------------------------------------- schemas


SCHEMAS = {path.stem: json.loads(path.read_text()) for path in Path(__file__).parent.glob("*_schema.json")}


def problems(path: Path, change: tuple[str, str] = ("", "")) -> list[str]:
    """What the schema has against the file, in which `change` was replaced."""
    text = path.read_text()
    assert change[0] in text
    schema = SCHEMAS["skypilot_schema" if path in SKY_TASKS else "jobset_schema"]
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    return [error.message for error in validator.iter_errors(yaml.safe_load(text.replace(*change)))]


TYPOS = {
    "gke_jobset_tpu.yaml": [
        *(("maxRestarts:", "maxRestart:"), ("nodeSelector:", "nodeselector:"), ("backoffLimit:", "backofLimit:")),
        *(("action: FailJobSet", "action: FailJobsSet"), ("action: FailJob\n", "action: Fail\n")),
        *(("- name: config_error\n        action", "- action"), ("values: [2, 143]", "values: ['2', '143']")),
        ("- name: PJRT_DEVICE\n                      value", "- name: PJRT_DEVICE\n                      values"),
        *(
            ("v1alpha2", "v1"),
            ("parallelism: 4", "parallelism: four"),
            ("restartPolicy: Never", "restartPolicy: never"),
        ),
    ],
    "skypilot_gpu.yaml": [
        *(("accelerators:", "acelerators:"), ("num_nodes: 2", "num_nodes: two"), ("CONFIG: configs", "CONFIG: 1 #")),
        *(("use_spot: true", "use_spot: maybe"), ("max_restarts_on_errors", "max_restarts")),
    ],
}


def test_a_template_is_what_its_api_takes_and_a_typo_is_found() -> None:
    assert {path.name: problems(path) for path in [*JOBSETS, *SKY_TASKS] if problems(path)} == {}
    unseen = [(name, typo) for name, typos in TYPOS.items() for typo in typos if not problems(LAUNCH / name, typo)]
    assert unseen == []


# --------------------------------------------------------------------------------------------------------- JobSets


def job(path: Path) -> dict[str, Any]:
    [replicated] = read(path)["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def pod(path: Path) -> dict[str, Any]:
    return job(path)["template"]["spec"]


def action_after(path: Path, exit_code: int, *conditions: str) -> str:
    """What becomes of the JobSet when a pod ends, as the two controllers decide.

    Job: kubernetes/kubernetes, pkg/controller/job/pod_failure_policy.go: the first rule that fits, and its message.
    JobSet: kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go: the first rule that fits, else RestartJobSet.
    """
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for index, rule in enumerate(job(path)["podFailurePolicy"]["rules"]):
        end = f"matching {rule['action']} rule at index {index}"
        fitting = [c["type"] for c in rule.get("onPodConditions", []) if c["type"] in conditions]
        if fitting:
            reason, message = "PodFailurePolicy", f"Pod default/x has condition {fitting[0]} {end}"
            break
        if exit_code in rule.get("onExitCodes", {}).get("values", []):
            failed = f"Container train for pod default/x failed with exit code {exit_code}"
            reason, message = "PodFailurePolicy", f"{failed} {end}"
            break
    for rule in read(path)["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
            return rule["action"]
    return "RestartJobSet"


def test_what_a_jobset_makes_of_an_exit_code(assert_golden: Callable[[Path, str], None]) -> None:
    lines: list[str] = []
    for path in JOBSETS:
        lines.append(f"{path.name}: maxRestarts {read(path)['spec']['failurePolicy']['maxRestarts']}")
        for code in (1, 2, 137, 143):
            lines.append(f"  exit {code}: {action_after(path, code)}")
            lines.append(f"  exit {code} in a disruption: {action_after(path, code, 'DisruptionTarget')}")
    assert_golden(Path(__file__).parent / "golden/jobset_actions.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize("path", JOBSETS, ids=lambda path: path.name)
def test_what_the_schema_of_a_jobset_cannot_say(path: Path) -> None:
    assert pod(path)["restartPolicy"] == "Never", "a podFailurePolicy needs it; the webhook's default is OnFailure"
    assert job(path)["completionMode"] == "Indexed"
    assert job(path)["parallelism"] == job(path)["completions"]
    assert job(path)["backoffLimit"] == 0
    [container] = pod(path)["containers"]
    rules = job(path)["podFailurePolicy"]["rules"]
    assert {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule} == {container["name"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod(path)["volumes"]}
    assert not {"sh", "bash"} & {*container["command"]}, "a shell as process 1 keeps SIGTERM to itself"
    config, *overrides = container["args"]
    assert load_config(ROOT / config.removeprefix("--config="), overrides).checkpoint.dir == "gs://BUCKET/llama_1b"


def test_hosts_chips_and_the_first_pod_fit_together() -> None:
    tpu, gpu = LAUNCH / "gke_jobset_tpu.yaml", LAUNCH / "gke_jobset_gpu.yaml"
    sides = pod(tpu)["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    [container] = pod(tpu)["containers"]
    assert math.prod(map(int, sides)) == job(tpu)["parallelism"] * container["resources"]["limits"]["google.com/tpu"]
    variables = {variable["name"]: variable["value"] for variable in pod(gpu)["containers"][0]["env"]}
    name, [replicated] = read(gpu)["metadata"]["name"], read(gpu)["spec"]["replicatedJobs"]
    assert variables["RDZV_ENDPOINT"] == f"{name}-{replicated['name']}-0-0.{name}:29500"
    assert int(variables["NNODES"]) == job(gpu)["completions"]
    task = read(LAUNCH / "skypilot_tpu.yaml")
    assert (task["num_nodes"], task["resources"]["job_recovery"]["recover_on_exit_codes"]) == (1, [143])


# ------------------------------------------------------------------------------------------------------ Dockerfiles


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_fits_the_project(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    instructions = [(word, rest) for word, _, rest in (line.partition(" ") for line in text.splitlines())]
    assert {word for word, _ in instructions} <= {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "ENV", "CMD"}
    (first, base), (last, command) = instructions[0], instructions[-1]
    assert (first, last) == ("FROM", "CMD")
    assert json.loads(command)[:2] == ["python", "-m"]
    image = re.fullmatch(r"python:(\d+\.\d+)-slim-\w+", base)
    assert image
    assert SpecifierSet(PROJECT["requires-python"]).contains(f"{image[1]}.0")
    assert f"PYTHON ?= python{image[1]}" in (ROOT / "Makefile").read_text(), "not the Python of the tests"
    copied = [source for word, rest in instructions if word == "COPY" for source in rest.split()[:-1]]
    assert [source for source in copied if not (ROOT / source).exists()] == []


@pytest.mark.parametrize("path", [*DOCKERFILES, *SKY_TASKS, LAUNCH / "tpu_workers.sh"], ids=lambda path: path.name)
def test_the_extras_that_are_installed_exist(path: Path) -> None:
    text = path.read_text()
    [line] = re.findall(r"pip install (?:--[a-z-]+ )*(.*)", text)
    if default := re.search(r"(?:ARG EXTRA=|EXTRA: |TPU_EXTRA:-)(\w+)", text):
        assert "torchtpu" in text
        line = re.sub(r"\$extra|\$EXTRA", default[1], line)
    ours, *others = shlex.split(line.removesuffix('"') if line.count('"') % 2 else line)
    extra = re.fullmatch(r"\.(?:\[(\w+)\])?", ours)
    assert extra
    assert extra[1] is None or extra[1] in PROJECT["optional-dependencies"]
    tested = {Requirement(line).name for line in PROJECT["optional-dependencies"]["test"]}
    assert {*others} <= tested, "a store that no test uses"
    assert ("tpu" in path.name) == (extra[1] == "tpu")
