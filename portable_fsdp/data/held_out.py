"""What is held out by a name of its own (`data.eval_split`): nothing that is trained on is in it."""

import logging

from portable_fsdp.config.data import Data
from portable_fsdp.data.examples import Source, name_of
from portable_fsdp.data.records import HuggingFace
from portable_fsdp.data.sources import EXAMPLES, columns_of, files_of, open_source
from portable_fsdp.runtime.errors import DataError

log = logging.getLogger("portable_fsdp")

KEY = "data.eval_split"


def open_apart(data: Data, eval_split: str) -> tuple[Source, Source]:
    """The sources to train on and to hold out; `eval_split`: a file, a glob, or a split of the data set.

    Files that both name are left to the one held out. Raises DataError if none is left then, and for splits that have
    rows in common.
    """
    if data.source in EXAMPLES:
        return _files_apart(data, data.model_copy(update={"path": eval_split}))
    trained = HuggingFace(str(data.path), data.split, columns_of(data))
    held_out = HuggingFace(str(data.path), eval_split, columns_of(data), KEY)
    if trained.shares_rows_with(held_out):
        raise DataError(
            f"{KEY}: expected a split without rows that are trained on, found {eval_split} beside "
            f"data.split={data.split or 'train'}.\n"
            "  Hold out a share of the documents (data.eval_split=5%), or take parts that don't meet: "
            "data.split='train[5%:]' data.eval_split='train[:5%]'."
        )
    return trained, held_out


def _files_apart(data: Data, held_out: Data) -> tuple[Source, Source]:
    files, theirs = files_of(data), files_of(held_out, KEY)
    real = {path.resolve() for path in theirs}
    kept = [path for path in files if path.resolve() not in real]
    if not kept:
        raise DataError(
            f"{KEY}: expected files beside those to train on, found all of data.path={data.path} in {held_out.path}.\n"
            "  Name another file, or hold out a share of the documents: data.eval_split=5%."
        )
    if len(kept) < len(files):
        left_out = [path for path in files if path.resolve() in real]
        log.info("data: held out (%s) and not trained on, though data.path names it too: %s", KEY, name_of(left_out))
    return open_source(data, kept), open_source(held_out, theirs)
