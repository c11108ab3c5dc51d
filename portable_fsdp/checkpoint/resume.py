"""Find the checkpoint that a run resumes from, and the differences between the run that saved it and this one.

All processes search together and reach the same result.
"""

import json
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from portable_fsdp.backends.contract import Backend
from portable_fsdp.checkpoint import manifests
from portable_fsdp.checkpoint.storage import exists, locate, store_of
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.config import schema
from portable_fsdp.config.describe import changed, default_of, plain_values, shortened
from portable_fsdp.runtime.collective_errors import on_process_0, together
from portable_fsdp.runtime.errors import CheckpointError, ConfigError, StoreError, table, without_passwords

log = logging.getLogger("portable_fsdp")

T = TypeVar("T")
_PROBE = ".portable_fsdp-"  # prefix of the file by which processes check that they share a folder


class ResumePoint(NamedTuple):
    """A checkpoint to resume from, intact as far as `checkpoint.verify` checks."""

    path: Path
    passed_over: tuple[str, ...]  # why newer ones were skipped
    is_own: bool  # in this run's folder
    weights_only: bool = False


def error_about(subject: str) -> Callable[[Exception], CheckpointError]:
    """Return a function that returns a CheckpointError as it is, and wraps any other error, with class and message."""

    def wrapped(error: Exception) -> CheckpointError:
        is_ours = isinstance(error, CheckpointError)
        return error if is_ours else CheckpointError(f"{subject}: {type(error).__name__}: {error}")

    return wrapped


class Search:
    """Searches the checkpoints in `folder`, or checks the one that the config names."""

    def __init__(self, folder: Path, backend: Backend, settings: schema.Checkpoint) -> None:
        self.damaged: set[str] = set()  # names of the checkpoints that were skipped
        self._folder = folder
        self._backend = backend
        self._settings = settings

    def find(self, resume: str, last_save: manifests.NamedSave | None) -> ResumePoint | None:
        """Find the checkpoint to resume from; see `Checkpoints.find`. *collective*"""
        self._require_shared()
        names = self._on_process_0(lambda: [path.name for path in manifests.committed_steps(self._folder)])
        own = [self._folder / name for name in names]
        if last_save is not None and resume != "none":
            self._compare(last_save, resume, own)
        if resume == "none" and own:
            older = f" and {len(own) - 1} older" if len(own) > 1 else ""
            raise CheckpointError(
                f"checkpoint.resume: none: {self._folder} already has {own[0].name}{older}.\n"
                "  Use checkpoint.resume: auto to resume from it, or another run.dir for a new run."
            )
        if resume == "none":
            return None
        if resume == "auto" or (own and self._started_from(resume, own)):
            return self._newest(own)
        return self._named(locate(resume), own)

    def _on_process_0(self, work: Callable[[], T], subject: str | None = None) -> T:
        as_error = error_about(subject or f"checkpoints in {self._folder}")
        return on_process_0(self._backend, work, as_error)

    def _require_shared(self) -> None:
        """Refuse a folder that isn't writable, or is a different one on another host. Leaves no file."""
        store = store_of(self._folder)
        # A local folder may not exist yet: probe the nearest parent that does.
        parents = (self._folder, *self._folder.absolute().parents)
        probed = next(path for path in parents if path.exists()) if store.is_local else self._folder

        def write_probe() -> str:
            name = _PROBE + uuid.uuid4().hex
            try:
                store.write(probed / name, [b""])
            except OSError as error:
                raise CheckpointError(
                    f"checkpoints in {self._folder}: can't write there: {error}\n"
                    "  Set checkpoint.dir or run.dir to a writable folder."
                ) from None
            return name

        probe = self._on_process_0(write_probe)

        def require_probe() -> None:
            if not exists(probed / probe):
                raise CheckpointError(
                    f"checkpoints in {self._folder}: process {self._backend.process.index} can't see\n"
                    "  a file that process 0 created there. Is the folder local to each host?\n"
                    "  Set checkpoint.dir (or run.dir) to a shared folder, or to an object store (s3://, gs://)."
                )

        try:
            together(self._backend, require_probe, error_about(f"checkpoints in {self._folder}"))
        finally:
            self._on_process_0(lambda: store.remove(probed / probe))

    def _newest(self, own: list[Path]) -> ResumePoint | None:
        reasons: list[str] = []
        for path in own:
            reason = self._damage(path)
            if reason is None:
                for passed_over in reasons:
                    log.warning("skipped a damaged checkpoint: %s", passed_over)
                if reasons:
                    log.warning("resuming from the older %s", path.name)
                return ResumePoint(path, tuple(reasons), is_own=True)
            self.damaged.add(path.name)
            reasons.append(reason)
        if reasons:
            raise CheckpointError(
                f"checkpoint.resume: auto: no intact checkpoint in {self._folder}, {len(reasons)} damaged:\n"
                + "\n".join(reasons)
                + "\n  A run never falls back to fresh weights."
            )
        return None

    def _compare(self, last_save: manifests.NamedSave, resume: str, own: list[Path]) -> None:
        """Refuse to start over if the run's events name a save; warn if the newest checkpoint is older than that."""
        newest = next(iter(own), None)
        if newest is None and resume != "auto":  # after a full disk: resume from a save, into another folder
            newest = locate(resume)
            folders = [address.rpartition("/")[0] for address in (without_passwords(str(newest)), last_save.path)]
            newest = newest if _is_same_place(*folders) else None
        if newest is None:
            begin_anew = "checkpoint.resume=none" if resume == "auto" else "another run.dir"
            raise CheckpointError(
                f"checkpoint.resume: {resume}: the last save that {last_save.events} names is {last_save.path},\n"
                f"  but there is no checkpoint in {self._folder}. Mount or restore that folder, or set checkpoint.dir "
                f"to the one\n  that holds it. To start over, without the steps so far: {begin_anew}."
            )
        if (manifests.step_of(newest) or 0) < last_save.step and self._backend.process.index == 0:
            log.warning(
                "the newest checkpoint is of step %d, but %s names a save of step %d: %s",
                *(manifests.step_of(newest), last_save.events, last_save.step, last_save.path),
            )

    def _started_from(self, resume: str, own: list[Path]) -> bool:
        """Whether the run's newest checkpoint was saved by a start from this address: the same command again."""

        def saved_resume() -> object:
            for path in own:
                try:
                    return manifests.read_manifest(path).config.get("checkpoint", {}).get("resume")
                except StoreError:
                    raise
                except CheckpointError:  # `_newest` skips it
                    continue
            return None

        saved = self._on_process_0(saved_resume)
        return saved not in (None, "auto", "none") and _is_same_place(str(saved), without_passwords(resume))

    def _named(self, path: Path, own: list[Path]) -> ResumePoint:
        subject = f"checkpoint {path.name}"
        self._on_process_0(lambda: manifests.require_checkpoint(path), subject)
        reason = self._damage(path)
        if reason is not None:
            raise CheckpointError(reason)
        weights_only = self._settings.load == "weights_only"
        is_own = any(_is_same_place(str(each), str(path)) for each in own)
        start = 0 if weights_only else self._on_process_0(lambda: manifests.read_manifest(path).step, subject)
        newest = next(iter(own), None)
        if newest is not None and (not is_own or (manifests.step_of(newest) or 0) > start):
            raise CheckpointError(
                f"checkpoint.resume: from {path} the run would begin at step {start}, but {self._folder} already\n"
                f"  has {newest.name} of another history. Use checkpoint.resume: auto to resume from that, or "
                "another run.dir."
            )
        return ResumePoint(path, (), is_own, weights_only)

    def _damage(self, path: Path) -> str | None:
        """Return why a checkpoint isn't intact, as far as `checkpoint.verify` checks; None if it is. Each process
        hashes some of the files. Raises CheckpointError if the storage doesn't answer: that isn't damage.
        """
        subject = f"checkpoint {path.name}"

        def check() -> str | None:
            try:
                with Reader(path) as reader:
                    if self._settings.verify == "full":
                        reader.verify(self._backend.process)
                    elif self._settings.verify == "size":
                        reader.verify_sizes()
            except StoreError:
                raise
            except Exception as error:
                return str(error_about(subject)(error))
            return None

        reason = together(self._backend, check, error_about(subject))
        return next((each for each in self._backend.gather(reason) if each is not None), None)


def _is_same_place(a: str, b: str) -> bool:
    """Whether two addresses, paths or URLs, name one place."""
    return locate(a).resolve() == locate(b).resolve()


# ------------------------------------------------------------------------------------------- differences of the config

_CURVE_SECTIONS = ("model", "data", "optim", "precision")
_CURVE_KEYS = ("run.seed", "train.global_batch", "train.steps", "train.epochs", "train.max_grad_norm")
"""Settings that change the loss curve. All others (devices, sharding, memory, micro_batch, logging) don't."""

_BASE = "model.base"

_IGNORED = (
    *("run.name", "run.dir", "run.peer_timeout_s", "run.step_timeout_s", "run.max_restarts"),
    *("run.grace_s", "train.stop_at", "checkpoint"),
)
"""Keys that set where a run is stored, when it saves and how long it waits."""


class Difference(NamedTuple):
    """A key of the config with both values; or `data.rows`, `data.tokenizer`, `model.base` (their content), and
    `config` itself, which an import doesn't have."""

    name: str
    saved: Any
    now: Any
    makes_curve: bool

    def __str__(self) -> str:
        return "; ".join(self.lines())

    def lines(self) -> list[str]:
        """`optim.lr: 0.1, now 0.2`; for mappings one line per key that differs."""
        return [f"{name}: {saved}, now {now}" for name, saved, now in self.rows()]

    def rows(self) -> list[tuple[str, str, str]]:
        """Return the same in columns, long values cut to the part around the first difference."""
        rows: list[tuple[str, str, str]] = []
        for name, values in changed({self.name: self.saved}, {self.name: self.now}).items():
            saved, now = map(json.dumps, values)
            start = next((i - 30 for i, pair in enumerate(zip(saved, now, strict=False)) if len(set(pair)) > 1), 0)
            saved, now = (shortened(f"...{text[start:]}" if start > 0 else text) for text in (saved, now))
            rows.append((name, saved, now))
        return rows


def differences(
    manifest: manifests.Manifest,
    config: Mapping[str, Any],
    rows: str | None,
    tokenizer: str | None,
    base: manifests.BaseFingerprint | None = None,
    *,
    is_own: bool,
) -> list[Difference]:
    """Return all differences except tensors, those that change the curve first. Equal rows and tokenizer count as equal
    data, an equal base as an equal `model.pretrained`. `is_own`: in this run's folder, so it must have its name."""
    if config and not manifest.config:
        return [Difference("config", "unknown (imported)", "this run's", True)]
    changes: dict[str, Difference] = {}
    ours, theirs = _settings(config), _settings(manifest.config)
    theirs["model.dropout"], ours["model.dropout"] = _dropouts(theirs, ours, manifest.architecture)
    for name in dict.fromkeys([*ours, *theirs]):
        old, new = _value(theirs, name), _value(ours, name)  # a key that one release lacks has its default
        if old != new and name not in _IGNORED:
            makes_curve = name in _CURVE_KEYS or name.split(".")[0] in _CURVE_SECTIONS
            changes[name] = Difference(name, old, new, makes_curve)
    contents = (("data.rows", manifest.data.rows, rows), ("data.tokenizer", manifest.data.tokenizer, tokenizer))
    if all(old == new and old is not None for _, old, new in contents):
        changes = {name: change for name, change in changes.items() if not name.startswith("data.")}
    else:
        for name, old, new in contents:
            if None not in (old, new) and old != new:
                changes.setdefault(name, Difference(name, old, new, True))
    if base is not None and manifest.base is not None:
        changes.pop("model.pretrained", None)
        changes.pop("model.gguf_file", None)
        if base.fingerprint != manifest.base.fingerprint:
            changes[_BASE] = Difference(_BASE, str(manifest.base), str(base), True)
    before, now = manifests.run_name(manifest.config), manifests.run_name(config)
    if is_own and before != now:
        changes["run.name"] = Difference("run.name", before, now, True)
    return sorted(changes.values(), key=lambda change: not change.makes_curve)


def require_same_scheme(
    saved: manifests.BaseFingerprint | None, now: manifests.BaseFingerprint | None, checkpoint: str
) -> None:
    """Refuse a checkpoint whose base was quantised otherwise than this run's. Raises CheckpointError."""
    old, new = (base and base.scheme for base in (saved, now))
    if old != new:
        forms = [f"quantised by {scheme}" if scheme else "not quantised" for scheme in (old, new)]
        raise CheckpointError(
            f"checkpoint {checkpoint}: its base was {forms[0]}, and this run's is {forms[1]} (precision.frozen).\n"
            f"  Set precision.frozen={old or 'auto'}, or start from its adapters: checkpoint export --format peft, and "
            "model.lora.start_from."
        )


def require_same_base(changes: Iterable[Difference], allow: Sequence[str], checkpoint: str) -> None:
    """Refuse a checkpoint that leaves out another base than this run's, unless allowed. Raises CheckpointError."""
    for change in changes:
        if change.name == _BASE and not _is_allowed(_BASE, allow):
            raise CheckpointError(
                f"checkpoint {checkpoint}: expected the base model that its adapters were trained on:\n"
                f"    {change.saved}\n  found another in model.pretrained:\n    {change.now}\n"
                "  Set model.pretrained to the original one (a folder, or org/name@revision of the hub).\n"
                f"  To use the other one: checkpoint.allow='[{_BASE}]'."
            )


def require_allowed(changes: Iterable[Difference], allow: Sequence[str], checkpoint: str, source: str = "") -> None:
    """Refuse changes to the curve that `checkpoint.allow` doesn't name. Raises CheckpointError with a table of them.

    `source`: the saved run's data.source.
    """
    refused = [change for change in changes if change.makes_curve and not _is_allowed(change.name, allow)]
    if not refused:
        return
    rows = [("", "saved", "now"), *(row for change in refused for row in change.rows())]
    shown, names = table(rows, indent="    "), ", ".join(change.name for change in refused)
    cause = ""
    if source in ("python_docs", "python_source") and any(change.name == "data.rows" for change in refused):
        cause = f"  {source} differs by Python version: resume with the Python that the run began with.\n"
    raise CheckpointError(
        f"checkpoint {checkpoint}: the config differs from that of the run that saved it:\n{shown}\n{cause}"
        f"  To resume with these changes: checkpoint.allow='[{names}]'.\n"
        "  To start a new run from its weights: checkpoint.load=weights_only\n"
        "  checkpoint.resume=FOLDER run.dir=ANOTHER."
    )


def check_allow(allow: Sequence[str], config: Mapping[str, Any]) -> None:
    """Refuse names in `checkpoint.allow` that are no section or key that changes the curve. Raises ConfigError."""
    keys = [f"{section}.{key}" for section in _CURVE_SECTIONS for key in config.get(section, {})]
    others = ("data.rows", "data.tokenizer", _BASE, "run.name", "config", "replicas")
    unknown = [name for name in allow if name not in {*_CURVE_SECTIONS, *_CURVE_KEYS, *keys, *others}]
    if unknown:
        raise ConfigError(
            f"checkpoint.allow: expected names of settings that change the loss curve ({', '.join(_CURVE_SECTIONS)}: a "
            f"section or one of its keys; {', '.join(_CURVE_KEYS)}), found {', '.join(unknown)}.\n"
            "  Other settings may change freely."
        )


def _is_allowed(name: str, allow: Sequence[str]) -> bool:
    return any(name == allowed or name.startswith(f"{allowed}.") for allowed in allow)


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """`section.key` -> value, those of removed keys at the keys that replace them."""
    config = schema.with_successors(config)
    sections = ((name, keys) for name, keys in config.items() if isinstance(keys, dict) and name not in _IGNORED)
    return {f"{name}.{key}": value for name, keys in sections for key, value in cast(dict[str, Any], keys).items()}


def continues_without_dropout(manifest: manifests.Manifest, config: Mapping[str, Any]) -> bool:
    """Whether a run without `model.dropout` must go on without dropout although its model has rates, since the run that
    saved the checkpoint had none. Older releases had none."""
    ours = _settings(config)
    saved, now = _dropouts(_settings(manifest.config), ours, manifest.architecture)
    return bool(manifest.config) and ours.get("model.dropout") is None and saved == 0 != now


def _dropouts(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], architecture: Mapping[str, Any] | None
) -> tuple[Any, Any]:
    """Resolve both values of `model.dropout`; 0 for a model without rates."""
    rates = [rate for key, rate in (architecture or {}).items() if "drop" in key and isinstance(rate, float) and rate]
    values: list[Any] = []
    for settings, missing in ((theirs, 0.0), (ours, None)):
        value = schema.resolve_dropout(settings.get("model.dropout", missing), settings.get("model.pretrained"))
        values.append(0.0 if value == "published" and architecture is not None and not rates else value)
    return values[0], values[1]


def _value(settings: Mapping[str, Any], name: str) -> Any:
    value = settings[name] if name in settings else plain_values(default_of(name))
    if name == "model.lora" and isinstance(value, dict):
        return {**schema.Lora().model_dump(mode="json"), **value}
    return value
