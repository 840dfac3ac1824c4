// SPDX-License-Identifier: Apache-2.0
// Arguments and results of a dispatch; mirrored by ctypes structures in launch.py.
#pragma once

#include <stdint.h>

#include "abi.h"

namespace metal_cpu {

enum BufferKind : uint32_t { kind_input = 0, kind_output = 1, kind_shape = 2 };

struct Buffer {
  const char* name;
  void* data;
  uint64_t bytes;
  uint32_t element_bytes;
  uint32_t kind;
  uint32_t initialized;  // a read before any write is allowed
};

enum Order : uint32_t { order_forward = 0, order_reverse = 1, order_random = 2 };

struct Launch {
  void (*entry)(void* const*, const Position&);
  const Buffer* buffers;
  uint32_t num_buffers;
  uint32_t grid[3];         // threads
  uint32_t threadgroup[3];  // threads
  uint32_t order;
  uint64_t seed;
};

/// Per buffer; check mode only.
struct BufferTraffic {
  uint64_t read_bytes;
  uint64_t written_bytes;
  uint64_t lines_read;
  uint64_t lines_written;
  uint64_t unique_lines_read_by_threadgroup;
};

struct Counters {
  uint64_t threadgroups;
  uint64_t threadgroup_bytes;  // declared by one threadgroup
  uint64_t barriers;           // sum over all threadgroups
  uint64_t simd_collectives;   // once per simdgroup
  uint64_t partial_collectives;  // those executed with lanes missing
  BufferTraffic* traffic;      // one per buffer
};

struct Violation {
  char kind[32];  // empty: no violation
  char text[1024];
};

}  // namespace metal_cpu

extern "C" void metal_cpu_run(
    const metal_cpu::Launch* launch, metal_cpu::Counters* counters, metal_cpu::Violation* violation);
