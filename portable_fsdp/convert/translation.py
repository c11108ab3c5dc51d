"""A config that was put together from files of other tools, as one YAML file of ours with a comment for each key."""

from collections.abc import Iterator

from portable_fsdp.config.describe import option_names, yaml_value
from portable_fsdp.config.load import Loaded
from portable_fsdp.convert.facts import Import


def translation(loaded: Loaded) -> str:
    """YAML of every option that is not left to its default; `load_config` reads it back to an equal Config.

    Above each key stands where it came from; at the end, as comments, what the imports say that no option does.
    """
    values = loaded.config.model_dump()
    lines: list[str] = []
    section = ""
    for option in option_names():
        if option not in loaded.origins:
            continue
        name, _, key = option.partition(".")
        if name != section:
            section = name
            lines += ["", f"{name}:"]
        lines += [f"  # {line}" for line in origin(loaded, option).splitlines()]
        lines.append(f"  {key}: {yaml_value(values[name][key])}")
    for imported in loaded.imports:
        lines += ["", *(f"# {line}" for line in unsaid(imported))]
    return "\n".join(lines).lstrip("\n") + "\n"


def origin(loaded: Loaded, option: str) -> str:
    """`accelerate.yaml:12: mixed_precision: bf16 (why)`, or just file:line, or the override."""
    where = loaded.origins.get(option, "default")
    for imported in loaded.imports:
        setting = imported.settings.get(option)
        if setting is not None and setting.origin == where:
            return setting.quote + (f" ({setting.remark})" if setting.remark else "")
    return where


def unsaid(imported: Import) -> Iterator[str]:
    """A line for each key of an import that sets no option: the launcher decides, and what isn't needed."""
    for title, keys in (("the launcher decides", imported.launcher), ("sets nothing", imported.not_needed)):
        if keys:
            yield f"{imported.path}: {title}:"
        for note in keys:
            line = f"{note.where.rpartition(':')[2]}: " if note.where != str(imported.path) else ""
            yield f"  {line}{note.key}: {' '.join(note.text.split())}: {note.remark}"
