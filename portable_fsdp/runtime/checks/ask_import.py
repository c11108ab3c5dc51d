"""In a child process: can a package be imported? An extension built for another torch fails only here."""

import importlib
import json
import sys

from portable_fsdp.runtime.process import end_with_parent


def main(argv: list[str]) -> int:
    end_with_parent(int(argv[0]))
    importlib.import_module(argv[1])
    print(json.dumps({"imported": argv[1]}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
