// SPDX-License-Identifier: Apache-2.0
// Threadgroup memory: arrays with gaps between them, in one region.
#pragma once

#include <stdint.h>

namespace metal_cpu {

constexpr uint64_t threadgroup_memory_limit = 32 * 1024;  // Apple GPUs, every family
constexpr unsigned max_threadgroup_variables = 256;

struct ThreadgroupVariable {
  const char* name;
  char* data;  // null: not yet used in this dispatch
  uint64_t bytes;
  uint64_t element_bytes;
};

struct Arena {
  ThreadgroupVariable variables[max_threadgroup_variables];
  unsigned count;  // upper bound of used indices
  uint64_t declared;
  char* next;
};

extern Arena arena;

char* arena_region();
uint64_t arena_region_bytes();

/// Clears the variables of the last kernel.
void clear_arena();

/// Fills all variables with 0xFF, a NaN in every float format, to expose reads before writes.
void poison_arena();

}  // namespace metal_cpu
