# SPDX-License-Identifier: Apache-2.0
"""Translates a call of a kernel to a C++ translation unit for clang's AMD back end."""

from __future__ import annotations

import mlx.core as mx

from ..signature import ATTRIBUTES, Parameter, type_name
from ..translate import with_made_vectors, with_variables
from ..unrun import Call

#: The kernel's name in the unit.
NAME = "proxy"

# Position attributes that a body may use. Lanes of a simdgroup follow one another.
_POSITIONS = {
    "thread_position_in_threadgroup": "uint3{X(workitem), Y(workitem), Z(workitem)}",
    "threadgroup_position_in_grid": "uint3{X(workgroup), Y(workgroup), Z(workgroup)}",
    "thread_position_in_grid": (
        "uint3{X(workgroup) * SIZE_X + X(workitem), Y(workgroup) * SIZE_Y + Y(workitem), "
        "Z(workgroup) * SIZE_Z + Z(workitem)}"
    ),
    "thread_index_in_threadgroup": "INDEX",
    "thread_index_in_simdgroup": "INDEX % 32",
    "simdgroup_index_in_threadgroup": "INDEX / 32",
    "simdgroups_per_threadgroup": "SIZE_X * SIZE_Y * SIZE_Z / 32",
    "threads_per_threadgroup": "uint3{SIZE_X, SIZE_Y, SIZE_Z}",
    "threads_per_simdgroup": "32",
    "threads_per_grid": "uint3{grid_x, grid_y, grid_z}",
    "threadgroups_per_grid": "uint3{grid_x / SIZE_X, grid_y / SIZE_Y, grid_z / SIZE_Z}",
}
_MACROS = """\
#define X(OF) __builtin_amdgcn_##OF##_id_x()
#define Y(OF) __builtin_amdgcn_##OF##_id_y()
#define Z(OF) __builtin_amdgcn_##OF##_id_z()
#define INDEX (X(workitem) + SIZE_X * (Y(workitem) + SIZE_Y * Z(workitem)))
"""


def unit(call: Call) -> str:
    """Returns the C++ text for a call, with one kernel named NAME.

    Raises:
        ValueError: the kernel uses a Metal attribute that the translation does not support.
    """
    missing = [name for name in call.signature.mentions.attributes if name not in _POSITIONS]
    if missing:
        raise ValueError(f"{call.kernel}: the proxy does not define {', '.join(missing)}")
    sizes = "".join(
        f"#define SIZE_{axis} {size}u\n" for axis, size in zip("XYZ", call.threadgroup, strict=True)
    )
    parameters = [_parameter(p) for p in call.signature.parameters]
    parameters += [f"uint grid_{axis}" for axis in "xyz"]
    positions = "".join(
        f"const {ATTRIBUTES[name]} {name} = {_POSITIONS[name]};\n"
        for name in call.signature.mentions.attributes
    )
    text = (
        f'#include "shim.h"\n{call.header}\n#line 1 "signature"\n{sizes}{_MACROS}'
        f'extern "C" __attribute__((amdgpu_kernel, '
        f"amdgpu_flat_work_group_size({call.threads}, {call.threads})))\n"
        f"void {NAME}({', '.join(parameters)}) {{\n"
        f"{''.join(map(_argument, call.template.items()))}{positions}"
        f'#line 1 "{call.kernel}"\n{with_variables(call.source, _variable)}\n}}\n'
    )
    return with_made_vectors(text)


def _parameter(parameter: Parameter) -> str:
    """Declares a parameter; by value if Metal's is a reference, which AMD's kernels cannot take."""
    is_value = parameter.type.endswith("&")
    kind = parameter.type.split()[-1].rstrip("&") if is_value else parameter.type
    return f"{kind} {parameter.name}"


def _argument(argument: tuple[str, bool | int | mx.Dtype]) -> str:
    name, value = argument
    if isinstance(value, mx.Dtype):
        return f"typedef {type_name(value)} {name};\n"
    return f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {int(value)};\n"


def _variable(number: int, type: str, name: str, extents: str) -> str:
    return f"static threadgroup {type} {name}{extents} __attribute__((loader_uninitialized));"
