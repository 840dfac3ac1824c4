// SPDX-License-Identifier: Apache-2.0
#include "arena.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "scheduler.h"

namespace metal_cpu {

Arena arena;

#if defined(METAL_CPU_CHECK)
// Wide enough that an index off by a whole threadgroup's memory lands in a gap.
constexpr uint64_t gap = 64 * 1024;
#else
constexpr uint64_t gap = 256;
#endif

uint64_t arena_region_bytes() {
  return threadgroup_memory_limit * 2 + gap * (max_threadgroup_variables + 1);
}

char* arena_region() {
  static char* const region = [] {
    void* memory = mmap(nullptr, arena_region_bytes(), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      perror("the interpreter cannot reserve threadgroup memory");
      abort();
    }
    return static_cast<char*>(memory);
  }();
  return region;
}

void clear_arena() {
  for (unsigned i = 0; i < arena.count; ++i) arena.variables[i].data = nullptr;
  arena.count = 0;
  arena.declared = 0;
  arena.next = arena_region() + gap;
}

void poison_arena() {
  for (unsigned i = 0; i < arena.count; ++i)
    if (arena.variables[i].data) memset(arena.variables[i].data, 0xFF, arena.variables[i].bytes);
}

}  // namespace metal_cpu

extern "C" void* metal_cpu_threadgroup_memory(
    unsigned index, const char* name, unsigned long bytes, unsigned long element_bytes,
    unsigned long alignment) {
  using namespace metal_cpu;
  if (index >= max_threadgroup_variables)
    give_up("threadgroup_memory", "more than 256 threadgroup variables");
  ThreadgroupVariable& variable = arena.variables[index];
  if (variable.data) return variable.data;
  arena.declared = (arena.declared + alignment - 1) / alignment * alignment + bytes;
  if (arena.declared > threadgroup_memory_limit)
    give_up("threadgroup_memory",
            "threadgroup variable '%s' brings the kernel to %lu bytes of threadgroup memory; a GPU has %lu",
            name, (unsigned long)arena.declared, (unsigned long)threadgroup_memory_limit);
  char* data = arena.next;
  data += (alignment - reinterpret_cast<uintptr_t>(data) % alignment) % alignment;
  memset(data, 0xFF, bytes);
  variable = {name, data, bytes, element_bytes};
  arena.next = data + bytes + gap;
  if (index >= arena.count) arena.count = index + 1;
  scheduler.counters->threadgroup_bytes = arena.declared;
  return data;
}
