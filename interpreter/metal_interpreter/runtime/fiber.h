// SPDX-License-Identifier: Apache-2.0
// A fiber is a stack and the registers a function call must preserve, kept on that stack.
#pragma once

namespace metal_cpu {

/// Virtual; pages are touched on use. Thread-local arrays of a kernel live here.
constexpr unsigned long stack_bytes = 256 * 1024;

/// Saves the running fiber at `*save` and goes on with the one saved as `load`.
extern "C" void metal_cpu_switch(void** save, void* load);

/// Makes the stack below `top` look as if `start` (which must never return) was just called.
void* new_fiber(char* top, void (*start)());

/// One region for the stacks of `max_threads` fibers, made on first use.
char* stack_region();

/// The highest address of fiber `index`'s stack. Tops are spread over cache sets: at equal offsets
/// of equal pages a simdgroup's 32 hot frames would evict each other.
char* stack_top(unsigned index);

}  // namespace metal_cpu
