// SPDX-License-Identifier: Apache-2.0
// Records the last accesses to each piece of memory, and barriers between them. Check mode only.
#pragma once

#include <stdint.h>

namespace metal_cpu {

/// The last write and the last reads of one granule of memory. All zero: untouched.
struct Cell {
  uint32_t writer;  // threadgroup << 11 | thread << 1 | atomic
  uint32_t write_time;
  uint32_t reader;  // threadgroup << 12 | thread << 2 | Readers
  uint32_t read_time;
  uint32_t write_site;  // code offset within the kernel's library
  uint32_t read_site;
};

constexpr uint64_t max_threadgroups_checked = 1 << 20;

enum class Access : uint8_t { read, write, atomic_read, atomic_write };

/// Two kinds of memory, because a barrier's flags select which it orders.
enum class Memory : uint8_t { device, threadgroup };

struct Race {
  bool found;
  const char* earlier;  // "written" or "read"
  uint64_t threadgroup;
  unsigned thread;
  uint32_t site;
};

/// Records an access of the running thread in a cell; returns the earlier one that it races with.
///
/// Two accesses, at least one a write, need an order: the same thread, a threadgroup_barrier between
/// threads of a threadgroup, or a simdgroup_barrier between lanes of a simdgroup, with the flag of
/// that memory. Between threadgroups there is none. Two atomic accesses need none.
Race enter(Cell& cell, Access access, Memory memory, uint32_t site);

/// The clock of the running threadgroup: advances at every barrier.
void reset_clock();
void order_threadgroup(unsigned mem_flags);
void order_simdgroup(unsigned simdgroup, unsigned mem_flags);

/// Zeroed memory that is allocated where it is touched.
void* reserve(uint64_t bytes);
void unreserve(void* memory, uint64_t bytes);

}  // namespace metal_cpu
