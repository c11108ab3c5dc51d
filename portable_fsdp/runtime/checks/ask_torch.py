"""In a child process: what torch knows of this host's GPUs, as one line of JSON."""

import json
import sys
import warnings
from typing import Any, cast

from portable_fsdp.runtime.process import end_with_parent


def main(argv: list[str]) -> int:
    end_with_parent(int(argv[0]))
    import torch

    answer: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "driver_cuda": 0, "devices": []}
    if torch.version.cuda is not None:
        answer["driver_cuda"] = _driver_cuda()
        with warnings.catch_warnings():  # the same words come as an error below
            warnings.simplefilter("ignore")
            available = torch.cuda.is_available()
        answer["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] * available
        answer["problem"] = "" if available else _problem()
        answer["nccl"] = (
            ".".join(map(str, cast(Any, torch.cuda).nccl.version())) if torch.distributed.is_nccl_available() else ""
        )
    print(json.dumps(answer))
    return 0


def _driver_cuda() -> int:
    """The newest CUDA that the driver speaks, as 12080 for 12.8; 0 without a driver. No public name of torch tells."""
    import torch

    ask = getattr(cast(Any, torch)._C, "_cuda_getDriverVersion", None)
    return int(ask()) if ask is not None else 0


def _problem() -> str:
    import torch

    try:
        torch.cuda.init()
    except Exception as error:  # whatever it is, it is what we want to know
        return str(error).strip().splitlines()[0]
    return "torch.cuda.is_available() is False"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
