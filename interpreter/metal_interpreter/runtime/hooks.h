// SPDX-License-Identifier: Apache-2.0
// Hooks for check mode. In run mode they are empty and free.
#pragma once

#include "scheduler.h"

namespace metal_cpu {

#if defined(METAL_CPU_CHECK)
void dispatch_begins();
void dispatch_ends();
void threadgroup_begins();
void threadgroup_ends();
/// Orders memory for all threads of the threadgroup / of one simdgroup.
void threadgroup_barrier_passed(unsigned mem_flags);
void simdgroup_barrier_passed(unsigned simdgroup, unsigned mem_flags);
/// The lanes of `mask` left a simdgroup function or barrier together.
void lanes_synchronized(unsigned simdgroup, uint32_t mask);
/// Returns the address of buffer `index` while the kernel runs.
void* placed(unsigned index);
#else
inline void dispatch_begins() {}
inline void dispatch_ends() {}
inline void threadgroup_begins() {}
inline void threadgroup_ends() {}
inline void threadgroup_barrier_passed(unsigned) {}
inline void simdgroup_barrier_passed(unsigned, unsigned) {}
inline void lanes_synchronized(unsigned, uint32_t) {}
inline void* placed(unsigned index) { return scheduler.launch->buffers[index].data; }
#endif

}  // namespace metal_cpu
