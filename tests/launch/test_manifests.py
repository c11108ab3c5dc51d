"""Templates that are no scripts: JobSets against their schema, SkyPilot's keys, Dockerfiles against pyproject.toml."""

import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from portable_fsdp.config.load import load_config

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SCHEMA = json.loads((Path(__file__).parent / "jobset_schema.json").read_text())
JOBSETS = sorted(LAUNCH.glob("gke_jobset_*.yaml"))
SKY_TASKS = sorted(LAUNCH.glob("skypilot_*.yaml"))
DOCKERFILES = sorted(LAUNCH.glob("Dockerfile.*"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def file_name(path: Path) -> str:
    return path.name


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


# --------------------------------------------------------------------------------------------------------- JobSets


def problems(jobset: Any) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(jobset)]


@pytest.mark.parametrize("path", JOBSETS, ids=file_name)
def test_a_jobset_is_what_the_api_takes(path: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert problems(read(path)) == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("maxRestarts:", "maxRestart:"),
        ("nodeSelector:", "nodeselector:"),
        ("backoffLimit:", "backofLimit:"),
        ("action: FailJobSet", "action: FailJobsSet"),
        ("action: FailJob\n", "action: Fail\n"),
        ("- name: config_error\n        action", "- action"),
        ("values: [2, 143]", "values: ['2', '143']"),
        ("parallelism: 4", "parallelism: four"),
        ("- name: PJRT_DEVICE\n                      value", "- name: PJRT_DEVICE\n                      values"),
        ("apiVersion: jobset.x-k8s.io/v1alpha2", "apiVersion: jobset.x-k8s.io/v1"),
        ("restartPolicy: Never", "restartPolicy: never"),
    ],
)
def test_a_typo_is_found(right: str, wrong: str) -> None:
    text = (LAUNCH / "gke_jobset_tpu.yaml").read_text()
    assert right in text
    assert problems(yaml.safe_load(text.replace(right, wrong)))


def pod(path: Path) -> dict[str, Any]:
    return job(path)["template"]["spec"]


def job(path: Path) -> dict[str, Any]:
    [one] = read(path)["spec"]["replicatedJobs"]
    return one["template"]["spec"]


def action_after(path: Path, exit_code: int, conditions: tuple[str, ...] = ()) -> str:
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
            reason, message = (
                "PodFailurePolicy",
                f"Container train for pod default/x failed with exit code {exit_code} {end}",
            )
            break
    for rule in read(path)["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
            return rule["action"]
    return "RestartJobSet"


@pytest.mark.parametrize("path", JOBSETS, ids=file_name)
@pytest.mark.parametrize(
    ("exit_code", "conditions", "action"),
    [
        (2, (), "FailJobSet"),
        (1, (), "RestartJobSet"),
        (137, (), "RestartJobSet"),
        (1, ("DisruptionTarget",), "RestartJobSetAndIgnoreMaxRestarts"),
        (143, ("DisruptionTarget",), "RestartJobSetAndIgnoreMaxRestarts"),
    ],
)
def test_what_a_jobset_makes_of_an_exit_code(
    path: Path, exit_code: int, conditions: tuple[str, ...], action: str
) -> None:
    assert action_after(path, exit_code, conditions) == action


def test_a_stop_on_request_on_tpu_is_not_counted() -> None:
    assert action_after(LAUNCH / "gke_jobset_tpu.yaml", 143) == "RestartJobSetAndIgnoreMaxRestarts"
    assert read(LAUNCH / "gke_jobset_tpu.yaml")["spec"]["failurePolicy"]["maxRestarts"] > 0


@pytest.mark.parametrize("path", JOBSETS, ids=file_name)
def test_what_the_schema_cannot_say(path: Path) -> None:
    assert pod(path)["restartPolicy"] == "Never", "a podFailurePolicy needs it; the webhook's default is OnFailure"
    assert job(path)["completionMode"] == "Indexed"
    assert job(path)["parallelism"] == job(path)["completions"]
    assert job(path)["backoffLimit"] == 0
    [container] = pod(path)["containers"]
    rules = job(path)["podFailurePolicy"]["rules"]
    assert {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule} == {container["name"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod(path)["volumes"]}
    assert not {"sh", "bash"} & {*container["command"]}, "a shell as process 1 keeps SIGTERM to itself"


def test_the_tpu_topology_is_that_of_its_hosts() -> None:
    path = LAUNCH / "gke_jobset_tpu.yaml"
    sides = pod(path)["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    chips = 1
    for side in sides:
        chips *= int(side)
    [container] = pod(path)["containers"]
    assert chips == job(path)["parallelism"] * container["resources"]["limits"]["google.com/tpu"]


def test_the_pods_of_the_gpu_jobset_meet_at_the_first() -> None:
    path = LAUNCH / "gke_jobset_gpu.yaml"
    variables = {one["name"]: one["value"] for one in pod(path)["containers"][0]["env"]}
    name, [replicated] = read(path)["metadata"]["name"], read(path)["spec"]["replicatedJobs"]
    assert variables["RDZV_ENDPOINT"] == f"{name}-{replicated['name']}-0-0.{name}:29500"
    assert int(variables["NNODES"]) == job(path)["completions"]


@pytest.mark.parametrize("path", JOBSETS, ids=file_name)
def test_the_config_of_a_jobset_loads(path: Path) -> None:
    config, *overrides = pod(path)["containers"][0]["args"]
    assert load_config(ROOT / config.removeprefix("--config="), overrides).checkpoint.dir == "gs://BUCKET/llama_1b"


# -------------------------------------------------------------------------------------------------------- SkyPilot

# skypilot-org/skypilot, sky/utils/schemas.py (get_task_schema, _get_single_resources_schema): the keys that a task of
# ours may want, with their types. The package itself takes 45 s to install; its 0.14.1 loaded both files.
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}


def of_keys(**kinds: str | Mapping[str, Any]) -> dict[str, Any]:
    properties = {key: {"type": kind} if isinstance(kind, str) else kind for key, kind in kinds.items()}
    return {"type": "object", "properties": properties, "additionalProperties": False}


SKY_SCHEMA = of_keys(
    name="string",
    workdir="string",
    num_nodes="integer",
    envs=TEXTS,
    file_mounts="object",
    setup="string",
    run="string",
    resources=of_keys(
        infra="string",
        accelerators="string",
        accelerator_args=of_keys(runtime_version="string"),
        use_spot="boolean",
        disk_size="integer",
        image_id="string",
        job_recovery=of_keys(
            max_restarts_on_errors="integer",
            recover_on_exit_codes={"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}},
        ),
    ),
)


def unfit(task: Any) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(SKY_SCHEMA).iter_errors(task)]


@pytest.mark.parametrize("path", SKY_TASKS, ids=file_name)
def test_a_sky_task_has_keys_that_skypilot_knows(path: Path) -> None:
    assert unfit(read(path)) == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("accelerators:", "acelerators:"),
        ("num_nodes: 2", "num_nodes: two"),
        ("CONFIG: configs", "CONFIG: 1 #"),
        ("use_spot: true", "use_spot: maybe"),
        ("max_restarts_on_errors", "max_restarts"),
    ],
)
def test_a_typo_in_a_sky_task_is_found(right: str, wrong: str) -> None:
    text = (LAUNCH / "skypilot_gpu.yaml").read_text()
    assert right in text
    assert unfit(yaml.safe_load(text.replace(right, wrong)))


def test_a_sky_task_on_tpu_is_one_node() -> None:
    task = read(LAUNCH / "skypilot_tpu.yaml")
    assert task["num_nodes"] == 1
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [143]


# ------------------------------------------------------------------------------------------------------ Dockerfiles


def instructions(path: Path) -> list[tuple[str, str]]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in text.splitlines())]


@pytest.mark.parametrize("path", DOCKERFILES, ids=file_name)
def test_a_dockerfile_reads(path: Path) -> None:
    found = instructions(path)
    assert found[0][0] == "FROM"
    assert {word for word, _ in found} <= {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "CMD"}
    assert found[-1][0] == "CMD"
    assert json.loads(found[-1][1])[:2] == ["python", "-m"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=file_name)
def test_the_python_of_the_image_fits(path: Path) -> None:
    image = re.fullmatch(r"python:(\d+\.\d+)-slim-\w+", instructions(path)[0][1])
    assert image
    assert SpecifierSet(PROJECT["requires-python"]).contains(f"{image[1]}.0")
    assert f"PYTHON ?= python{image[1]}" in (ROOT / "Makefile").read_text(), "not the Python of the tests"


@pytest.mark.parametrize("path", [*DOCKERFILES, *SKY_TASKS, LAUNCH / "tpu_workers.sh"], ids=file_name)
def test_the_extras_that_are_installed_exist(path: Path) -> None:
    [line] = re.findall(r"pip install (?:--[a-z-]+ )*(.*)", path.read_text())
    ours, *others = shlex.split(line.rstrip('"'))
    extra = re.fullmatch(r"\.(?:\[(\w+)\])?", ours)
    assert extra
    assert extra[1] is None or extra[1] in PROJECT["optional-dependencies"]
    tested = {Requirement(one).name for one in PROJECT["optional-dependencies"]["test"]}
    assert {*others} <= tested, "a store that no test uses"
    assert ("tpu" in path.name) == (extra[1] == "tpu")


@pytest.mark.parametrize("path", DOCKERFILES, ids=file_name)
def test_what_is_copied_is_there(path: Path) -> None:
    for word, rest in instructions(path):
        if word == "COPY":
            *sources, _ = rest.split()
            assert [source for source in sources if not (ROOT / source).exists()] == []
