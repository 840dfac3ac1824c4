// SPDX-License-Identifier: Apache-2.0
// What a compiled kernel and the runtime know of each other. Needs no standard header, because
// kernel units are compiled without any.
#pragma once

// The compiler must neither copy such a call into both arms of a branch nor make one of two: threads
// wait together if and only if they execute the same call of the source.
#define METAL_CPU_SYNC [[clang::convergent, clang::nomerge]]

namespace metal_cpu {

constexpr unsigned simdgroup_size = 32;
constexpr unsigned max_threads = 1024;

/// Everything a kernel can ask about its own position; MLX's names. uint3 as three numbers.
struct Position {
  unsigned dispatch_quadgroups_per_threadgroup;
  unsigned dispatch_simdgroups_per_threadgroup;
  unsigned dispatch_threads_per_threadgroup[3];
  unsigned grid_origin[3];
  unsigned grid_size[3];
  unsigned quadgroup_index_in_threadgroup;
  unsigned quadgroups_per_threadgroup;
  unsigned simdgroup_index_in_threadgroup;
  unsigned simdgroups_per_threadgroup;
  unsigned thread_execution_width;
  unsigned thread_index_in_quadgroup;
  unsigned thread_index_in_simdgroup;
  unsigned thread_index_in_threadgroup;
  unsigned thread_position_in_grid[3];
  unsigned thread_position_in_threadgroup[3];
  unsigned threadgroup_position_in_grid[3];
  unsigned threadgroups_per_grid[3];
  unsigned threads_per_grid[3];
  unsigned threads_per_simdgroup;
  unsigned threads_per_threadgroup[3];
};

/// What the last lane to reach a simdgroup function sees: where each lane's operand is and where
/// its result goes. Lanes not set in `active` have neither.
struct Lanes {
  unsigned active;
  const void* in[simdgroup_size];
  void* out[simdgroup_size];
};

using Fold = void (*)(const Lanes&);

}  // namespace metal_cpu

extern "C" {
/// Every compiled kernel exports this alone, and it calls the kernel once for one thread.
__attribute__((visibility("default"))) void metal_cpu_entry(
    void* const* buffers, const metal_cpu::Position& position);

/// Waits until every active lane of the simdgroup is here; the last one folds for all.
METAL_CPU_SYNC void metal_cpu_collective(metal_cpu::Fold fold, const void* in, void* out);
METAL_CPU_SYNC void metal_cpu_threadgroup_barrier(unsigned mem_flags);
METAL_CPU_SYNC void metal_cpu_simdgroup_barrier(unsigned mem_flags);

/// The memory of the `index`-th threadgroup variable of the kernel.
void* metal_cpu_threadgroup_memory(
    unsigned index, const char* name, unsigned long bytes, unsigned long element_bytes,
    unsigned long alignment);

unsigned metal_cpu_lane();
}
