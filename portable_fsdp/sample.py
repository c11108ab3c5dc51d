"""Print samples from an exported model, on the CPU: `python -m portable_fsdp.sample runs/demo --prompt "The "`.

FOLDER is a Hugging Face folder or peft adapters, as checkpoint.export writes them; a run's folder with such an export;
or with --gguf_file the folder of that file. Exit code: 0; 2 for a folder without a model, and for a prompt or number
that allows no text.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from portable_fsdp.runtime.command import CommandParser, at_least, run_command, to_stderr, to_stdout
from portable_fsdp.runtime.errors import EXIT_FINISHED, ConfigError, DataError
from portable_fsdp.runtime.files import parse_json, read_inside
from portable_fsdp.runtime.hub import (
    MODEL_FILES,
    TOKENIZER_FILES,
    before_transformers,
    panic_as_error,
    require_plain_files,
)

_EXPORT = "export"  # in run.dir
_CONFIG, _ADAPTERS = "config.json", "adapter_config.json"


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code (`runtime/errors.py`)."""
    return run_command(_parser(), arguments, _sample)


def _sample(options: argparse.Namespace) -> int:
    chosen = vars(options)
    folder, _ = chosen.pop("folder"), chosen.pop("flagfile")  # read already
    for text in sample(folder if options.gguf_file else exported_folder(folder), chosen.pop("prompt"), **chosen):
        to_stdout(f"{text}\n")
    return EXIT_FINISHED


def exported_folder(path: Path) -> Path:
    """Return `path`, or the export inside it. Raises ConfigError if neither holds a model."""
    for folder in (path, path / _EXPORT):
        if any((folder / name).is_file() for name in (_CONFIG, _ADAPTERS)):
            return folder
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder; name an exported model, or the run that wrote it.")
    raise ConfigError(
        f"{path}: no exported model here (config.json, or adapter_config.json), nor in {_EXPORT}/.\n"
        "  checkpoint.export=true writes it at the end of a run, python -m portable_fsdp.checkpoint export later"
    )


def sample(
    folder: Path,
    prompt: str,
    *,
    count: int,
    tokens: int,
    temperature: float,
    seed: int,
    chat: bool = False,
    gguf_file: str | None = None,
) -> Iterator[str]:
    """Generate `count` texts that begin with `prompt`, with at most `tokens` new tokens; reproducible by `seed`.

    `temperature` 0 is greedy. With `chat` the prompt is a user's message, and the texts are only the answers. Texts end
    at the model's last position, with a note on stderr. Raises ConfigError if transformers can't open the folder or
    finds no chat template, and for a prompt with no tokens or too many.
    """
    _require_files(folder, gguf_file)
    before_transformers()
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer, model = _opened(folder, {"gguf_file": gguf_file} if gguf_file else {})
    ids = _token_ids(tokenizer, prompt, folder, chat=chat)
    tokens = _tokens_that_fit(tokens, ids.shape[1], getattr(model.config, "max_position_embeddings", None))
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    torch.manual_seed(seed)
    for _ in range(count):
        with torch.no_grad():
            output = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                pad_token_id=0,  # unused: one row needs no padding
                **(sampling if temperature > 0 else {"do_sample": False}),
            )
        yield tokenizer.decode(output[0][ids.shape[1] if chat else 0 :], skip_special_tokens=True)


def _require_files(folder: Path, gguf_file: str | None) -> None:
    """Check the files first, also of adapters' local base: transformers would take a missing folder for a hub id."""
    from portable_fsdp.models.tensor_files import require_as_exported

    if gguf_file is not None and not (folder / gguf_file).is_file():
        raise ConfigError(f"--gguf_file: no file {gguf_file} in {folder}.")
    patterns = [pattern for pattern in TOKENIZER_FILES if pattern != _CONFIG]
    if gguf_file is None and not any(True for pattern in patterns for _ in folder.glob(pattern)):
        raise ConfigError(
            f"{folder}: no tokenizer beside the model (no tokenizer.json or similar file).\n"
            "  Copy its files there, or export again with --tokenizer PATH."
        )
    require_plain_files("sample", folder, (*MODEL_FILES, "adapter_*", "*.gguf", "*.bin"))
    require_as_exported(folder)
    if not (folder / _ADAPTERS).is_file():
        return
    try:
        name = parse_json(read_inside(folder / _ADAPTERS, folder)).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{folder / _ADAPTERS}: not a JSON object: {error}") from None
    base = Path(name or "")
    if name is None or ((base.is_absolute() or base.is_dir()) and not (base / _CONFIG).is_file()):
        raise ConfigError(
            f"{folder}: the adapters need a base model in Hugging Face format: "
            f"{'none is named' if name is None else f'no {_CONFIG} in {name}'} ({_ADAPTERS}).\n  Export the run with "
            "merged adapters: python -m portable_fsdp.checkpoint export RUN FOLDER"
        )
    if base.is_dir():
        require_plain_files("sample", base, MODEL_FILES)
        require_as_exported(base)


def _tokens_that_fit(tokens: int, prompt: int, positions: int | None) -> int:
    """Return how many of `tokens` fit after a prompt of `prompt` tokens. Raises ConfigError if none do."""
    if prompt == 0:
        raise ConfigError("--prompt: empty, and the tokenizer adds no first token; give some text.")
    if positions is None or prompt + tokens <= positions:
        return tokens
    if prompt >= positions:
        raise ConfigError(f"--prompt: expected fewer tokens than the model's {positions} positions, found {prompt}.")
    to_stderr(f"--tokens={tokens}: {positions - prompt} fit after a prompt of {prompt} (model: {positions} positions)")
    return positions - prompt


def _opened(folder: Path, file: dict[str, str]) -> tuple[Any, Any]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, AutoTokenizer
    from transformers.models.auto import modeling_auto

    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, **file}
    try:
        with panic_as_error(str(folder)):
            tokenizer = AutoTokenizer.from_pretrained(folder, **local)
        config: Any = AutoConfig.from_pretrained(folder, **local) if (folder / _CONFIG).is_file() and not file else None
        is_whole = type(config) in modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING  # Mistral 3 opens only so
        kind = (
            AutoModelForMultimodalLM
            if is_whole and type(config) not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
            else AutoModelForCausalLM
        )
        return tokenizer, kind.from_pretrained(folder, dtype=torch.float32, **local)
    except DataError:
        raise
    except Exception as error:  # transformers and peft raise exceptions of many classes, all about these files
        raise ConfigError(f"{folder}: transformers can't open the model and its tokenizer: {error}") from error


def _token_ids(tokenizer: Any, prompt: str, folder: Path, *, chat: bool) -> Any:
    """Tokenize the prompt: int64 `[1, seq]`."""
    if not chat:
        with panic_as_error(str(folder)):
            return tokenizer(prompt, return_tensors="pt")["input_ids"]
    if tokenizer.chat_template is None:
        raise ConfigError(f"{folder}: the tokenizer has no chat template; leave --chat out.")
    message, options = [{"role": "user", "content": prompt}], {"add_generation_prompt": True, "return_tensors": "pt"}
    try:
        with panic_as_error(str(folder)):
            return tokenizer.apply_chat_template(message, **options)["input_ids"]
    except DataError:
        raise
    except Exception as error:  # a template may raise anything
        raise ConfigError(f"{folder}: the chat template refuses the prompt: {error or type(error).__name__}.") from None


def _parser() -> CommandParser:
    parser = CommandParser("sample", __doc__ or "")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="an exported model, or the folder of its run")
    parser.add_argument("--gguf_file", metavar="NAME", help="a GGUF file in FOLDER, dequantised")
    parser.add_argument("--prompt", default="The ", help="start of each text")
    parser.switch("--chat", "the prompt is a user's message; prints answers")
    parser.add_argument("--count", type=at_least(1, int), default=3, metavar="N", help="number of texts")
    parser.add_argument("--tokens", type=at_least(1, int), default=60, metavar="N", help="maximum new tokens per text")
    parser.add_argument("--temperature", type=at_least(0, float), default=0.7, help="0: greedy")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    os.environ.setdefault("TQDM_DISABLE", "1")  # silences transformers' GGUF reader, which has no other switch
    sys.exit(main(sys.argv[1:]))
