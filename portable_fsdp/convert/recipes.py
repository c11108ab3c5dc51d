"""Rules for files that stand for a whole run: axolotl's recipes and TRL's SFT files. Their data, intervals and dtypes.

The table (`recipes.yaml`) says by which keys a file is recognised, and the tool's defaults. Rules that Trainer shares
are in `rules.py`.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any, cast

from portable_fsdp.convert.facts import ForeignFacts, KeyEntry
from portable_fsdp.convert.table import AXOLOTL, NO, TRL, Raw, in_words
from portable_fsdp.runtime.files import parse_json

_SOURCES = {"json": "jsonl", "jsonl": "jsonl", "parquet": "parquet", "text": "text", "txt": "text"}
_KNOWN = {
    *("path", "type", "split", "name", "revision", "data_files", "ds_type", "field", "field_messages"),
    *("message_property_mappings", "message_field_role", "message_field_content", "field_system", "field_tools"),
    *("field_thinking", "template_thinking_key", "roles_to_train", "train_on_eos", "train_on_eot", "eot_tokens"),
    *("drop_system_message", "message_field_training", "roles", "chat_template", "shards", "trust_remote_code"),
    *("train_on_inputs", "field_instruction", "field_input", "field_output", "shuffle"),
}
_ROLES = {
    *("human", "user", "gpt", "assistant", "chatgpt", "model", "tool", "function", "observation", "system"),
    *("ipython",),
}


def combine_recipe(facts: ForeignFacts) -> None:
    """Set the options of a whole run that follow from several keys."""
    rules: Mapping[str, tuple[Callable[[ForeignFacts], None], ...]] = {
        AXOLOTL: (
            _revision,
            _model,
            _targets,
            _trained,
            _bits,
            _datasets,
            _held_out,
            _test_rows,
            _template,
            _tokens,
            _intervals,
            _dtypes,
            _floor,
            _deepspeed,
            _tracker,
        ),
        TRL: (_revision, _trl_data, _trl_rows, _trl_adapters),
    }
    for rule in rules.get(facts.result.kind, ()):
        rule(facts)


def _off(raw: Raw) -> bool:
    return not raw or (isinstance(raw, str) and raw.lower() in (*NO, "none", "null"))


def _revision(facts: ForeignFacts) -> None:
    revision, model = facts.keys.get("~revision"), facts.keys.get("model.pretrained")
    if revision is not None and model is not None:
        facts.options["model.pretrained"] = model._replace(value=f"{model.value}@{revision.value}")


def _model(facts: ForeignFacts) -> None:
    if (plugins := facts.keys.get("~plugins")) is not None:
        fine = ("cut_cross_entropy", "liger", "kernels", "expert_parallel", "swanlab")
        for name in cast(list[str], plugins.value):
            if not any(f".{each}." in name for each in fine):
                text = f"{name} trains otherwise than this package does.\n  Take it out."
                facts.result.add_problem(plugins, text)
    config = facts.keys.get("~model_config")
    if config is not None and config.raw not in ({}, {"output_router_logits": "true"}):
        text = f"{config.text} changes the model's config, which is taken as published.\n  Take it out."
        facts.result.add_problem(config, text)


def _targets(facts: ForeignFacts) -> None:
    """peft takes one text as a regular expression over full names, but axolotl puts it into a list beside
    lora_target_linear, where it matches nothing."""
    key, lora = facts.keys.get("~lora.targets"), facts.options.get("model.lora")
    if key is None or lora is None or not isinstance(key.raw, str) or not re.search(r"[\\[(|*+?^$]", key.raw):
        return
    values = cast(dict[str, Any], lora.value)
    weights = cast(list[str], facts.value("~lora.parameters") or [])
    ends = "|".join(re.escape(name) for name in weights)
    targets = f"{key.raw}|.*\\.({ends})" if ends else key.raw
    if facts.value("~lora.linear"):
        targets = ["all-linear", *weights]
    facts.options["model.lora"] = lora._replace(value={**values, "targets": targets})


_PREFIX = re.compile(r"\^?((?:[\w.-]|\[(?:\w-\w|\w)+\])+?)(?:\.\*|(?<=\.weight)(\$)|(?<=\.bias)(\$))?")


def _trained(facts: ForeignFacts) -> None:
    """axolotl matches its expressions from the start of a name, and takes dots literally (utils/freeze.py)."""
    key = facts.keys.get("~trains")
    if key is None or "model.train_only" in facts.overridden:
        return
    matches = {text: _PREFIX.fullmatch(text) for text in cast(list[str], key.value)}
    ranges = [text for text in matches if re.search(r"\[[\d:]*\]$", text)]
    expressions = [text for text, match in matches.items() if match is None]
    if facts.value("~lora"):
        text = "beside adapters axolotl trains nothing: it freezes them too, whose names begin with base_model.\n  "
        text += "Take it out."
    elif ranges:
        text = f"{ranges[0]}: a range of rows doesn't train alone.\n  Name the whole weight."
    elif expressions:
        text = f"{expressions[0]}: a regular expression that no pattern says.\n  Set model.train_only: *, ? and [0-9]."
    else:
        patterns = [match[1] + ("" if match[2] or match[3] else "*") for match in matches.values() if match]
        facts.set("model.train_only", patterns, key, "the same names, as patterns")
        return
    facts.result.add_problem(key, text)


_BNB = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "bfloat16"}


def _bits(facts: ForeignFacts) -> None:
    """4 bits need adapter: qlora there (loaders/model.py); bnb_config_kwargs changes what bitsandbytes does."""
    four, more, is_qlora = facts.keys.get("~bits.4"), facts.keys.get("~bnb"), "~bits" in facts.keys
    if four is not None and not is_qlora and "~bits.8" not in facts.keys:
        del facts.options["precision.frozen"]
        facts.result.ignore(four, "axolotl quantises to 4 bits only with adapter: qlora")
    for name, value in more.value.items() if more is not None and isinstance(more.value, dict) else ():
        if name == "bnb_4bit_use_double_quant" and is_qlora:
            scheme = "nf4" if _off(value) else "nf4_double"
            facts.options["precision.frozen"] = facts.options["precision.frozen"]._replace(value=scheme)
        elif more is not None and value != _BNB.get(name) and name != "bnb_4bit_use_double_quant":
            facts.result.add_problem(more, f"{name}: {in_words(value)} is not built.\n  Take it out.")


# --------------------------------------------------------------------------------------------------------------- rows


def _datasets(facts: ForeignFacts) -> None:
    key = facts.keys.get("~datasets")
    if key is None:
        return
    raws = cast(list[Raw], key.value if isinstance(key.value, list) else [key.value])
    parts: list[dict[str, Any]] = []
    for number, raw in enumerate(raws):
        if not isinstance(raw, dict):
            facts.result.add_problem(key, f"expected mappings with path and type, found {in_words(raw):.60}.")
            continue
        problems = list[str]()
        parts.append(_dataset(facts, raw, problems))
        for text in problems:
            facts.result.add_problem(key._replace(key=f"datasets[{number}]"), text)
    if len(parts) == 1:
        says_end = facts.keys.keys() & {"~special_tokens", "~ends"}
        remark = "" if says_end else "ends of turns count, also where axolotl's end of text is another token"
        for name, value in parts[0].items():
            facts.set(f"data.{name}", value, key, remark if (name, value) == ("format", "chat") else "")
    elif parts:
        facts.set("data.mixture", [{**part, "weight": "rows"} for part in parts], key, "all rows of each, as there")
    if _value(facts, "data.long_rows") == "cut" and any(part["format"] == "text" for part in parts):
        text = (
            "axolotl cuts completion texts into pieces, and truncates other rows.\n  Take excess_length_strategy out."
        )
        facts.result.add_problem(facts.options["data.long_rows"], text)


def _dataset(facts: ForeignFacts, raw: Mapping[str, Raw], problems: list[str]) -> dict[str, Any]:
    """The keys of a source. Problems are added as sentences."""
    given = {name: value for name, value in raw.items() if not _off(value)}
    for name in given.keys() - _KNOWN:
        problems.append(f"{name} is not read.\n  Take it out, if the rows need no such step.")
    part = _place(given, problems)
    kind: Raw = given.get("type", "")
    name = kind.partition(".")[0] if isinstance(kind, str) and kind.startswith("chat_template") else kind
    all_count = facts.value("~all_count") or not _off(given.get("train_on_inputs"))
    if isinstance(name, dict):
        part |= _own_format(name, problems)
    elif name in ("alpaca", "alpaca:chat"):
        part |= {"format": "instruction", "prompt": name.replace(":", "-")}
    elif name == "completion":
        field = given.get("field", "text")
        return part | {"format": "text"} | ({"columns": {"text": field}} if field != "text" else {})
    elif name == "chat_template" and kind in ("chat_template", "chat_template.default"):
        part |= _chats(given, problems)
    else:
        what = f"type: {kind}" if kind else "no type"
        problems.append(
            f"{what} is not built.\n  Use alpaca, alpaca:chat, completion, chat_template, or a format of your own."
        )
    if all_count:
        part["train_on"] = "all"
    return part


def _place(given: Mapping[str, Raw], problems: list[str]) -> dict[str, Any]:
    path, files = str(given.get("path", "")), given.get("data_files")
    if isinstance(files, list) and len(files) == 1:
        files = files[0]
    if isinstance(files, list | dict):
        problems.append("data_files: expected one file or a glob.\n  Name one, or a dataset for each.")
    if str(given.get("revision", "")):
        path += f"@{given['revision']}"
    file = str(files) if isinstance(files, str) else path
    suffix = PurePath(file.removesuffix(".gz").removesuffix(".zst")).suffix.lstrip(".")
    kind = _SOURCES.get(suffix) or (_SOURCES.get(str(given.get("ds_type", ""))) if files else None)
    if kind is not None and (files is None or path in _SOURCES):
        return {"source": kind, "path": file}
    if files:
        problems.append("data_files of a hub dataset aren't chosen.\n  Name the subset by name, or download the file.")
    path += f":{given['name']}" if "name" in given and "@" not in path else ""
    return {"source": "huggingface", "path": path} | ({"split": given["split"]} if "split" in given else {})


def _own_format(fields: Mapping[str, Raw], problems: list[str]) -> dict[str, Any]:
    """axolotl's mapping of formats (prompt_strategies/user_defined.py), as texts with our placeholders."""
    known = {"format": "{instruction} {input} ", "no_input_format": "{instruction} ", "system_format": "{system}"}
    values = {**known, **{name: str(value) for name, value in fields.items() if isinstance(value, str)}}
    columns = {name: values.pop(f"field_{name}", name) for name in ("instruction", "input", "output", "system")}
    system, form = values.pop("system_prompt", ""), values.pop("system_format")
    texts = [values.pop(name) for name in ("format", "no_input_format")]
    if values:
        problems.append(f"type: {', '.join(values)} is not read.\n  Take it out.")
    head = form.replace("{system}", system.replace("{", "{{").replace("}", "}}")) if system else ""
    if columns["system"] != "system" or "field_system" in fields:
        head = form
    renamed = {name: column for name, column in columns.items() if column != name}
    return {"format": "instruction", "prompt": [head + text for text in texts]} | (
        {"columns": renamed} if renamed else {}
    )


def _chats(given: Mapping[str, Raw], problems: list[str]) -> dict[str, Any]:
    part: dict[str, Any] = {"format": "chat"}
    columns = {"messages": given.get("field_messages", "messages")}
    columns |= {name: given[f"field_{name}"] for name in ("system", "tools") if f"field_{name}" in given}
    if renamed := {name: column for name, column in columns.items() if column != name}:
        part["columns"] = renamed
    names = dict(cast(Mapping[str, Raw], given.get("message_property_mappings") or {}))
    names |= {name: given[f"message_field_{name}"] for name in ("role", "content") if f"message_field_{name}" in given}
    pair = names.pop("role", "role"), names.pop("content", "content")
    if pair not in (("role", "content"), ("from", "value")) or any(name != own for name, own in names.items()):
        problems.append(
            "message_property_mappings: messages have role and content, or from and value.\n  Rename the keys."
        )
    for role, others in cast(Mapping[str, Raw], given.get("roles") or {}).items():
        if {role, *([others] if isinstance(others, str) else cast(list[str], others or []))} - _ROLES:
            problems.append(f"roles: {role}: {in_words(others)} is not known.\n  Rename the roles in the rows.")
    trained = given.get("roles_to_train") or ["assistant"]
    trained = [trained] if isinstance(trained, str) else cast(list[str], trained)
    if {"gpt": "assistant"}.get(trained[0], trained[0]) != "assistant" or len(trained) > 1:
        part["train_on"] = trained
    if given.get("train_on_eos", "turn") != "turn":
        problems.append(
            f"train_on_eos: {given['train_on_eos']}: the end of each trained turn trains.\n  Set it to turn."
        )
    if given.get("field_thinking", "reasoning_content") != given.get("template_thinking_key", "reasoning_content"):
        problems.append("field_thinking: expected the template's own key, as template_thinking_key.\n  Rename the key.")
    if not _off(given.get("drop_system_message")):
        part["ignore"] = ["system"]
    return part


def _held_out(facts: ForeignFacts) -> None:
    key = facts.keys.get("~held_out")
    if key is not None and not key.is_default:
        if cast(float, key.value) < 1:
            facts.set("data.eval_split", f"{100 * cast(float, key.value):g}%", key, "chosen by hash, not the last rows")
        else:
            text = f"a number of rows, {key.text}, can't be held out.\n  Set a share, such as 0.05."
            facts.result.add_problem(key, text)


def _test_rows(facts: ForeignFacts) -> None:
    """Hold out one dataset with rows as in the only one that trains: another file, or split (there `test`)."""
    key, trained = facts.keys.get("~test_datasets"), facts.keys.get("~datasets")
    if key is None or trained is None or _off(key.raw) or "data.eval_split" in facts.given:
        return
    problems = list[str]()
    lists = (cast(list[Raw], each.value if isinstance(each.value, list) else [each.value]) for each in (trained, key))
    only, held = ([_dataset(facts, raw, problems) for raw in raws if isinstance(raw, dict)] for raws in lists)
    if len(only) == len(held) == 1 and not problems and "data.eval_split" not in facts.options:
        is_hub = only[0]["source"] == "huggingface"
        value = held[0].pop("split", "test") if is_hub else held[0].pop("path")
        name = "split" if is_hub else "path"
        if held[0] == {each: of for each, of in only[0].items() if each != name}:
            return facts.set("data.eval_split", value, key)
    text = (
        "expected one file, or split of the dataset that trains, with rows in the same form, and no val_set_size.\n"
        "  Set data.eval_split."
    )
    return facts.result.add_problem(key, text)


_PLAIN = ("tokenizer_default", "")


def _template(facts: ForeignFacts) -> None:
    """Set the template of chats; no other rows read it."""
    key, text = facts.keys.get("~chat_template"), facts.keys.get("~jinja")
    if not any(value.value == "chat" for name, value in facts.options.items() if name == "data.format") and not any(
        part.get("format") == "chat" for part in cast(list[dict[str, Any]], _value(facts, "data.mixture") or [])
    ):
        return
    if text is not None:
        if str(text.value).endswith(".jinja"):
            facts.set("data.chat_template", text.value, text)
        else:
            facts.result.add_problem(text, "expected the path of a file.\n  Write the template into a file.jinja.")
        return
    if key is None or str(key.value) in _PLAIN or str(key.value).startswith("tokenizer_default_fallback_"):
        return
    from portable_fsdp.data.templates import DIGESTS, TEMPLATES  # imports numpy

    name = {"phi_3": "phi3"}.get(str(key.value), str(key.value))
    if name in TEMPLATES or name in DIGESTS:
        facts.set("data.chat_template", name, key)
    else:
        text_ = "no template of this name is known.\n  Set tokenizer_default, or data.chat_template to its file."
        facts.result.add_problem(key, text_)
    arguments = facts.keys.get("~template_arguments")
    if arguments is not None and isinstance(arguments.value, dict):
        facts.set("data.chat_template_kwargs", arguments.value, arguments)


def _value(facts: ForeignFacts, option: str) -> object:
    return facts.options[option].value if option in facts.options else None


def _tokens(facts: ForeignFacts) -> None:
    special, added = facts.keys.get("~special_tokens"), facts.keys.get("~tokens")
    end = special.value.get("eos_token") if special is not None and isinstance(special.value, dict) else None
    if special is not None and end is not None:
        facts.set("data.end", end, special)
    if added is not None and isinstance(added.value, list) and added.value:
        text = (
            "new tokens need rows of the embedding, which no key adds.\n  Add them to the tokenizer's folder, and the "
        )
        facts.result.add_problem(added, f"{text}rows to the model's, and name both folders.")


# -------------------------------------------------------------------------------------------------- intervals, dtypes


def _intervals(facts: ForeignFacts) -> None:
    """Set saves and evaluations: a number in each epoch is a share of all steps (axolotl's core/builders)."""
    epochs = float(cast(Any, facts.given.get("train.epochs", facts.value("train.epochs"))) or 1)
    for fact, steps, option in (
        ("~saves", "~save_steps", "checkpoint.every"),
        ("~evals", "~eval_steps", "train.eval_every"),
    ):
        each, every = facts.keys.get(fact), facts.keys.get(steps)
        if option == "train.eval_every":
            if "data.eval_split" not in facts.options and "data.eval_split" not in facts.given:
                continue  # it evaluates no rows
            if each is not None or every is not None:
                facts.set("train.eval_on_start", True, cast(KeyEntry, each or every))
        if every is not None and not (each and not each.is_default):
            number = cast(float, every.value)
            value = f"{100 * number:g}%" if number < 1 else int(number)
            if option not in facts.options:
                facts.set(option, value, every)
        elif each is not None:
            is_save = option == "checkpoint.every"
            share = 100 / (cast(int, each.value) * epochs)
            share = share if is_save else min(share, 100)  # the last step always saves
            words = facts.words.get("save_strategy", "") if is_save else ""
            if (share < 100 or not is_save) and words not in ("no", "best", "steps"):
                facts.set(option, f"{share:.6g}%", each, f"{each.text} in each of {epochs:g} epochs")
    if "train.patience" in facts.options and "train.eval_every" not in facts.options:
        del facts.options["train.patience"]


def _dtypes(facts: ForeignFacts) -> None:
    """Weights rest in the dtype of `bf16`: those of a base, and all of them without FSDP."""
    mixed = facts.keys.get("~mixed")
    if mixed is None or mixed.value != "bfloat16" or "precision.frozen" in facts.options:
        return
    has_fsdp = bool(
        facts.value("~fsdp") or facts.value("~strategy") or facts.value("~deepspeed")
    ) or facts.sections.get("fsdp_config")
    if facts.value("~lora"):
        facts.set("precision.frozen", "bfloat16", mixed, "the base rests in it there")
    elif not has_fsdp and "precision.master" not in facts.options:
        facts.set("precision.master", "bfloat16", mixed, "weights and moments rest in it there, without FSDP")


def _floor(facts: ForeignFacts) -> None:
    floor, warmup = facts.keys.get("~floor"), facts.keys.get("~warmup_ratio")
    if floor is not None and "optim.min_lr_ratio" in facts.options:
        facts.options["optim.min_lr_ratio"] = floor._replace(option="optim.min_lr_ratio", value=floor.value or 1e-6)
    if warmup is not None and warmup.is_default and isinstance(facts.steps, int) and facts.steps * 0.03 > 100:
        facts.options["optim.warmup_steps"] = warmup._replace(option="optim.warmup_steps", value=100)


_ZERO = {0: "NO_SHARD", 1: "SHARD_GRAD_OP", 2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}
_ZERO_UNREAD = {
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("wall_clock_breakdown", "steps_per_print", "compile", "bf16", "prescale_gradients", "communication_data_type"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization", "fp16"),
}
"""Keys of DeepSpeed's JSON that the recipe says too, that only affect speed, or that are read here."""


def _deepspeed(facts: ForeignFacts) -> None:
    key = facts.keys.get("~deepspeed")
    if key is None:
        return
    try:
        stage, offloads = _zero_of(Path(str(key.value)))
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        facts.result.add_problem(key, f"{problem}.\n  Set sharding.strategy instead.")
        return
    facts.set("sharding.strategy", _ZERO[stage], key, "the same losses")
    if offloads:
        facts.set("memory.cpu_offload", True, key, "parameters and optimizer state together")


def _zero_of(path: Path) -> tuple[int, bool]:
    """Return DeepSpeed's stage, and whether it offloads: by its JSON, or by the name of a file that axolotl ships
    (deepspeed_configs/). Raises OSError or ValueError."""
    shipped = re.fullmatch(r"zero([123])(_bf16|_torch_compile)?(_cpuoffload_all|_cpuoffload_params)?", path.stem)
    if not path.is_file():
        if shipped is None:
            raise ValueError("no such file, nor one of axolotl's own (zero1.json to zero3_bf16_cpuoffload_all.json)")
        return int(shipped[1]), bool(shipped[3])
    content = _object(parse_json(path.read_bytes()), "the file")
    zero = _object(content.get("zero_optimization", {}), "zero_optimization")
    parts = [_object(zero.get(f"offload_{name}") or {}, f"offload_{name}") for name in ("optimizer", "param")]
    places, stage = [part.get("device", "none") for part in parts], zero.get("stage", 0)
    unread = sorted(content.keys() - _ZERO_UNREAD)
    if _object(content.get("fp16") or {}, "fp16").get("enabled") is True:
        unread.append("fp16")
    if not isinstance(stage, int) or stage not in _ZERO:
        unread.append(f"stage {stage}")
    unread += [f"offload to {place}" for place in places if place not in ("none", "cpu")]
    if unread:
        raise ValueError(f"{', '.join(unread)} is not read")
    return cast(int, stage), "cpu" in places


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected {name} as a JSON object, found {in_words(cast(Any, value)):.40}")
    return cast(dict[str, Any], value)


def _tracker(facts: ForeignFacts) -> None:
    key = facts.keys.get("~tracker")
    if key is not None and not _off(key.raw):
        tool = key.key.removeprefix("use_").removesuffix("_project").removesuffix("_project_name")
        names = {"comet": "comet_ml"}
        facts.set("observe.trackers", [names.get(tool, tool)], key)


# ---------------------------------------------------------------------------------------------------------- TRL's SFT


def _trl_data(facts: ForeignFacts) -> None:
    """Name the data. TRL reads the test split only if it evaluates."""
    name, mixed, split = (facts.keys.get(fact) for fact in ("~dataset", "~datasets", "~split"))
    form = facts.given.get("data.format", "text" if "~field" in facts.keys else None)
    if form is None:
        text = "TRL sees from the first row whether rows are texts, prompts with completions, or chats.\n  Say it: "
        at = name or mixed
        if at is not None:
            facts.result.add_problem(at, f"{text}data.format=text, prompt_completion or chat.")
        return
    field = facts.value("~field")
    shared: dict[str, Any] = {"format": form} if "data.format" not in facts.given else {}
    shared |= {"columns": {"text": field}} if form == "text" and field not in (None, "text") else {}
    if mixed is not None:
        raws: Any = mixed.value.get("datasets", []) if isinstance(mixed.value, dict) else mixed.value
        parts = [_trl_part(facts, mixed, raw) | {"format": form, **shared} for raw in cast(list[Raw], raws)]
        if len(parts) > 1:
            facts.set(
                "data.mixture", [{**part, "weight": "rows"} for part in parts], mixed, "all rows of each, as there"
            )
        shared |= parts[0] if len(parts) == 1 else {}
    elif name is not None and split is not None:
        path = f"{name.value}:{facts.value('~subset')}" if "~subset" in facts.keys else name.value
        shared |= {"source": "huggingface", "path": path, "split": split.value}
    if "data.mixture" not in facts.options:
        for key, value in shared.items():
            facts.set(f"data.{key}", value, cast(KeyEntry, name or mixed))
    test, held = facts.keys.get("~test_split"), facts.keys.get("~held_out")
    if held is not None:
        facts.set("data.eval_split", f"{100 * cast(float, held.value):g}%", held, "chosen by hash")
    elif facts.value("~evaluates"):
        facts.set("data.eval_split", test.value if test else "test", test or facts.keys["~evaluates"])


def _trl_part(facts: ForeignFacts, key: KeyEntry, raw: Raw) -> dict[str, Any]:
    given = {name: value for name, value in cast(Mapping[str, Raw], raw).items() if not _off(value)}
    given.setdefault("path", given.pop("id", ""))
    given |= {"name": given.pop("config")} if "config" in given else {}
    given.pop("columns", None)  # all that are read stay
    problems = [f"{name} is not read.\n  Take it out." for name in given if name not in _KNOWN]
    part = _place(given, problems)
    for text in problems:
        facts.result.add_problem(key, text)
    return part


def _trl_rows(facts: ForeignFacts) -> None:
    form = facts.given.get("data.format", _value(facts, "data.format"))
    packs, packed = facts.keys.get("~packs"), facts.keys.get("~packed")
    if packs is not None and packed is not None:
        kind = packed.value if packs.value else "none"
        if kind == "stream" and form not in (None, "text"):
            text = (
                "packing_strategy: wrapped cuts chats and completions anywhere.\n  Set bfd, or data.packing=documents."
            )
            facts.result.add_problem(packed, text)
        else:
            facts.set("data.packing", kind, packs)
        if kind != "stream":
            facts.set("data.long_rows", "cut", packs, "as TRL cuts them")
    counts = facts.keys.get("~chat_counts" if form == "chat" else "~counts")
    if counts is not None and form in ("chat", "prompt_completion"):
        facts.set("data.train_on", counts.value, counts)


def _trl_adapters(facts: ForeignFacts) -> None:
    """Without targets TRL takes peft's list for the architecture, which the file doesn't name."""
    switch, lora = facts.keys.get("~lora"), facts.options.get("model.lora")
    if switch is None or lora is None:
        return
    values = {"r": 16, "alpha": 32.0, "dropout": 0.05, **cast(dict[str, Any], lora.value)}
    facts.options["model.lora"] = lora._replace(value=values)
    if "targets" not in values:
        text = "TRL takes peft's list for the architecture, which the file doesn't say.\n  Name them: "
        facts.result.add_problem(switch, f"{text}lora_target_modules: [q_proj, v_proj] for Llama and Qwen.")
