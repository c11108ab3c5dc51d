"""XLA's CPU plugin in libtpu's place: TorchTPU's device "tpu" on a host without a chip, and without a compiler.

The plugin comes with the package lammps-jax-pjrt-cpu. TorchTPU gives a client options of TPUs, which a CPU's refuses;
`install` puts one that passes `cpu_device_count=1` in place of PJRT_Client_Create, in the plugin's table of functions.
"""

import ctypes
import importlib.util
import os
from pathlib import Path
from typing import Any

PACKAGE, LIBRARY = "lammps_jax_pjrt_cpu", "pjrt_c_api_cpu_plugin.so"

# openxla/xla, xla/pjrt/c/pjrt_c_api.h: PJRT_Api begins with struct_size (8 bytes), extension_start (8) and
# pjrt_api_version (24), then pointers to functions, of which PJRT_Client_Create is the eleventh.
CLIENT_CREATE_OFFSET = 40 + 10 * 8
INT64 = 1  # PJRT_NamedValue_kInt64


class NamedValue(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("name_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("value", ctypes.c_int64),
        ("value_size", ctypes.c_size_t),
    )


class ClientCreateArguments(ctypes.Structure):
    """The head of PJRT_Client_Create_Args."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("options", ctypes.c_void_p),
        ("option_count", ctypes.c_size_t),
    )


CLIENT_CREATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)

_kept: list[Any] = []  # what the plugin's table points to


def install() -> None:
    """Before torch is imported: else its own copy of what the plugin links is found first."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None, f"{PACKAGE} isn't installed: make env-torchtpu"
    path = Path(str(spec.origin)).with_name(LIBRARY)
    library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL | os.RTLD_DEEPBIND)
    library.GetPjrtApi.restype = ctypes.c_void_p
    slot = ctypes.c_void_p.from_address(library.GetPjrtApi() + CLIENT_CREATE_OFFSET)
    assert slot.value is not None
    create = CLIENT_CREATE(slot.value)
    name = b"cpu_device_count"
    option = NamedValue(ctypes.sizeof(NamedValue), None, name, len(name), INT64, 1, 1)

    @CLIENT_CREATE
    def create_on_cpu(address: int) -> int:
        arguments = ClientCreateArguments.from_address(address)
        before = arguments.options, arguments.option_count
        arguments.options, arguments.option_count = ctypes.addressof(option), 1
        try:
            return create(address)
        finally:
            arguments.options, arguments.option_count = before

    slot.value = ctypes.cast(create_on_cpu, ctypes.c_void_p).value
    _kept.extend([library, create, option, create_on_cpu])
    os.environ["TPU_LIBRARY_PATH"] = str(path)
