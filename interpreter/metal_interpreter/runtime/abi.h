// SPDX-License-Identifier: Apache-2.0
// Interface between compiled kernels and the runtime. Needs no standard header, because
// kernel units are compiled without any.
#pragma once

// The compiler must neither duplicate such a call into both arms of a branch nor merge two: threads
// wait together if and only if they execute the same call of the source.
#define METAL_CPU_SYNC [[clang::convergent, clang::nomerge]]

namespace metal_cpu {

constexpr unsigned simdgroup_size = 32;
constexpr unsigned max_threads = 1024;

/// A thread's position, with MLX's names. uint3 as three numbers.
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

/// Input of a simdgroup function's `fold`, run by the last lane: each lane's operand and
/// result location. Lanes not set in `active` have neither.
struct Lanes {
  unsigned active;
  const void* in[simdgroup_size];
  void* out[simdgroup_size];
};

using Fold = void (*)(const Lanes&);

}  // namespace metal_cpu

extern "C" {
/// The only export of a compiled kernel: calls the kernel for one thread.
__attribute__((visibility("default"))) void metal_cpu_entry(
    void* const* buffers, const metal_cpu::Position& position);

/// Waits for every active lane of the simdgroup; the last one folds for all.
METAL_CPU_SYNC void metal_cpu_collective(metal_cpu::Fold fold, const void* in, void* out);
METAL_CPU_SYNC void metal_cpu_threadgroup_barrier(unsigned mem_flags);
METAL_CPU_SYNC void metal_cpu_simdgroup_barrier(unsigned mem_flags);

/// Returns the memory of the kernel's threadgroup variable `index`.
void* metal_cpu_threadgroup_memory(
    unsigned index, const char* name, unsigned long bytes, unsigned long element_bytes,
    unsigned long alignment);

unsigned metal_cpu_lane();
}
