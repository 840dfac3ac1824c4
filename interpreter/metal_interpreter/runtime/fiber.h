// SPDX-License-Identifier: Apache-2.0
// Fibers: a stack each, which also holds the registers that a function call must preserve.
#pragma once

namespace metal_cpu {

/// Virtual size; pages are allocated on use. Thread-local arrays of a kernel live here.
constexpr unsigned long stack_bytes = 256 * 1024;

/// Saves the running fiber at `*save` and resumes the one saved as `load`.
extern "C" void metal_cpu_switch(void** save, void* load);

/// Makes the stack below `top` look as if `start` (which must never return) was just called.
void* new_fiber(char* top, void (*start)());

/// Returns the region for the stacks of `max_threads` fibers; allocates it on first use.
char* stack_region();

/// Returns the highest address of fiber `index`'s stack. Tops are spread over cache sets: at equal offsets
/// of equal pages, a simdgroup's 32 hot frames would evict each other.
char* stack_top(unsigned index);

}  // namespace metal_cpu
