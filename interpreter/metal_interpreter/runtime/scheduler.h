// SPDX-License-Identifier: Apache-2.0
// The state of one dispatch: its threads, simdgroups and barriers.
#pragma once

#include <stdint.h>

#include "abi.h"
#include "dispatch.h"

namespace metal_cpu {

enum class Wait : uint8_t { none, collective, simdgroup_barrier, threadgroup_barrier };

struct Thread {
  void* stack_pointer;
  Fold fold;
  const void* in;
  void* out;
  const void* site;  // return address of the call that it waits in
  unsigned mem_flags;
  Wait wait;
};

/// Bit masks over lanes.
struct Simdgroup {
  uint32_t live;     // has not returned from the kernel
  uint32_t ready;    // can run
  uint32_t waiting;  // in a simdgroup function or barrier
  bool mixed;        // the waiting lanes are not all in the same call
};

struct Threadgroup {
  uint64_t index;
  unsigned position[3];
  unsigned size[3];
  unsigned threads;
  unsigned simdgroups;
  unsigned finished;
  unsigned at_barrier;
  const void* barrier_site;  // of the first waiting thread
  bool mixed;                // threads wait at different barriers
};

struct Scheduler {
  const Launch* launch;
  Counters* counters;
  Violation* violation;  // set: the dispatch is being aborted
  void* main_stack_pointer;
  unsigned current;  // index of the running thread in its threadgroup
  uint64_t random;
  Threadgroup group;
  Thread threads[max_threads];
  Simdgroup simdgroups[max_threads / simdgroup_size];
};

extern Scheduler scheduler;

constexpr unsigned max_buffers = 31;  // limit of a Metal kernel
extern void* bound_buffers[max_buffers];

/// Aborts the dispatch from inside a kernel thread: returns from `metal_cpu_run`.
/// `format` is like printf's. Python replaces a code address written `{site:%p}` by file and line.
[[noreturn]] void give_up(const char* kind, const char* format, ...)
    __attribute__((format(printf, 2, 3)));

}  // namespace metal_cpu
