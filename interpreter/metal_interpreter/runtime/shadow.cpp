// SPDX-License-Identifier: Apache-2.0
#include "shadow.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "scheduler.h"

namespace metal_cpu {

namespace {

// Readers since the last write: one thread, lanes of one simdgroup, threads of one
// threadgroup, or several threadgroups.
enum Readers : uint32_t { one = 0, simdgroup = 1, threadgroup = 2, many = 3 };

/// Accesses before these times are ordered before the present, for the threads concerned.
struct Clock {
  uint32_t now;
  uint32_t threadgroup_since[2];  // indexed by Memory
  uint32_t simdgroup_since[2][max_threads / simdgroup_size];
};
Clock clock_;

struct Stamp {
  uint64_t threadgroup;
  unsigned thread;
  uint32_t time;
};

bool ordered(const Stamp& earlier, Memory memory) {
  const unsigned me = scheduler.current;
  if (earlier.threadgroup != scheduler.group.index) return false;
  if (earlier.thread == me) return true;
  const int kind = int(memory);
  if (earlier.time < clock_.threadgroup_since[kind]) return true;
  return earlier.thread / simdgroup_size == me / simdgroup_size &&
         earlier.time < clock_.simdgroup_since[kind][me / simdgroup_size];
}

bool all_ordered(const Stamp& latest, Readers readers, Memory memory) {
  const unsigned mine = scheduler.current / simdgroup_size;
  if (readers == many || latest.threadgroup != scheduler.group.index) return false;
  if (readers == one) return ordered(latest, memory);
  const int kind = int(memory);
  if (latest.time < clock_.threadgroup_since[kind]) return true;
  return readers == simdgroup && latest.thread / simdgroup_size == mine &&
         latest.time < clock_.simdgroup_since[kind][mine];
}

/// Returns a cell's readers, including the running thread.
Readers with_me(const Cell& cell, const Stamp& latest, Memory memory) {
  const Readers readers = Readers(cell.reader & 3);
  if (!cell.read_time) return one;
  if (readers == many || latest.threadgroup != scheduler.group.index) return many;
  // Reads before a barrier are ordered before everything still to come from this threadgroup,
  // and for other threadgroups any one reader is enough evidence.
  if (all_ordered(latest, readers, memory)) return one;
  if (readers == threadgroup) return threadgroup;
  return latest.thread / simdgroup_size == scheduler.current / simdgroup_size ? simdgroup
                                                                              : threadgroup;
}

}  // namespace

Race enter(Cell& cell, Access access, Memory memory, uint32_t site) {
  const uint64_t group = scheduler.group.index;
  const bool atomic = access == Access::atomic_read || access == Access::atomic_write;
  const bool write = access == Access::write || access == Access::atomic_write;
  const Stamp writer{cell.writer >> 11, cell.writer >> 1 & 1023, cell.write_time};
  const Stamp reader{cell.reader >> 12, cell.reader >> 2 & 1023, cell.read_time};
  if (cell.write_time && !(atomic && cell.writer & 1) && !ordered(writer, memory))
    return {true, "written", writer.threadgroup, writer.thread, cell.write_site};
  if (write) {
    if (cell.read_time && !all_ordered(reader, Readers(cell.reader & 3), memory))
      return {true, "read", reader.threadgroup, reader.thread, cell.read_site};
    cell.writer = uint32_t(group << 11 | scheduler.current << 1 | (atomic ? 1 : 0));
    cell.write_time = clock_.now;
    cell.write_site = site;
    cell.read_time = 0;
  } else if (!atomic) {  // an atomic read conflicts with plain writes only, which do not check readers
    const Readers readers = with_me(cell, reader, memory);
    cell.reader = uint32_t(group << 12 | scheduler.current << 2 | readers);
    cell.read_time = clock_.now;
    cell.read_site = site;
  }
  return {};
}

void reset_clock() {
  clock_ = {};
  clock_.now = 1;
}

void order_threadgroup(unsigned mem_flags) {
  clock_.now++;
  if (mem_flags & 1) clock_.threadgroup_since[int(Memory::device)] = clock_.now;
  if (mem_flags & 2) clock_.threadgroup_since[int(Memory::threadgroup)] = clock_.now;
}

void order_simdgroup(unsigned index, unsigned mem_flags) {
  clock_.now++;
  if (mem_flags & 1) clock_.simdgroup_since[int(Memory::device)][index] = clock_.now;
  if (mem_flags & 2) clock_.simdgroup_since[int(Memory::threadgroup)][index] = clock_.now;
}

void* reserve(uint64_t bytes) {
  void* memory = mmap(nullptr, bytes ? bytes : 1, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    perror("the interpreter's check mode cannot reserve address space");
    abort();
  }
  return memory;
}

void unreserve(void* memory, uint64_t bytes) { munmap(memory, bytes ? bytes : 1); }

}  // namespace metal_cpu
