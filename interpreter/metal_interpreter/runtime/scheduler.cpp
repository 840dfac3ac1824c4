// SPDX-License-Identifier: Apache-2.0
// Runs threadgroups one after another, with a fiber per thread. A fiber runs until it waits for
// others, then the next in schedule order runs. There is no preemption: code between
// two synchronization points is atomic here, and only the order of threads varies.
#include "scheduler.h"

#include <stdarg.h>
#include <stdio.h>

#include "arena.h"
#include "fiber.h"
#include "hooks.h"

namespace metal_cpu {

Scheduler scheduler;
void* bound_buffers[max_buffers];

namespace {

constexpr int nobody = -1;

uint64_t next_random() {  // xorshift64*, Vigna 2016
  uint64_t& x = scheduler.random;
  x ^= x >> 12;
  x ^= x << 25;
  x ^= x >> 27;
  return x * 0x2545F4914F6CDD1DULL;
}

unsigned nth_set_bit(uint32_t mask, unsigned n) {
  while (n--) mask &= mask - 1;
  return __builtin_ctz(mask);
}

unsigned pick_lane(uint32_t ready) {
  switch (scheduler.launch->order) {
    case order_forward: return __builtin_ctz(ready);
    case order_reverse: return 31 - __builtin_clz(ready);
    default: return nth_set_bit(ready, next_random() % __builtin_popcount(ready));
  }
}

/// Ends the wait of `lanes`, which are all in one call, and performs the call.
void release(unsigned index, uint32_t lanes) {
  Simdgroup& simdgroup = scheduler.simdgroups[index];
  Thread* threads = scheduler.threads + index * simdgroup_size;
  const Thread& first = threads[__builtin_ctz(lanes)];
  if (first.wait == Wait::collective) {
    Lanes seen;
    seen.active = lanes;
    for (uint32_t rest = lanes; rest; rest &= rest - 1) {
      const unsigned lane = __builtin_ctz(rest);
      seen.in[lane] = threads[lane].in;
      seen.out[lane] = threads[lane].out;
    }
    scheduler.counters->simd_collectives++;
    scheduler.counters->partial_collectives += lanes != simdgroup.live;
    first.fold(seen);
  } else {
    simdgroup_barrier_passed(index, first.mem_flags);
  }
  lanes_synchronized(index, lanes);
  simdgroup.waiting &= ~lanes;
  simdgroup.ready |= lanes;
  simdgroup.mixed = false;
  if (simdgroup.waiting) {  // the remaining lanes may be of one kind or several
    const void* site = nullptr;
    for (uint32_t rest = simdgroup.waiting; rest; rest &= rest - 1) {
      const void* other = threads[__builtin_ctz(rest)].site;
      if (site && other != site) simdgroup.mixed = true;
      site = other;
    }
  }
}

/// Handles lanes in different simdgroup functions when nothing else can run: the branches diverged, which
/// Metal allows. As on hardware, one branch runs at a time, with its lanes active: the
/// one whose code comes first, because compilers lay out a branch before what follows it.
bool release_one_branch(unsigned index) {
  const Simdgroup& simdgroup = scheduler.simdgroups[index];
  const Thread* threads = scheduler.threads + index * simdgroup_size;
  const void* site = nullptr;
  for (uint32_t rest = simdgroup.waiting; rest; rest &= rest - 1) {
    const Thread& thread = threads[__builtin_ctz(rest)];
    if (thread.wait == Wait::collective && (!site || thread.site < site)) site = thread.site;
  }
  if (!site) return false;
  uint32_t lanes = 0;
  for (uint32_t rest = simdgroup.waiting; rest; rest &= rest - 1) {
    const unsigned lane = __builtin_ctz(rest);
    if (threads[lane].wait == Wait::collective && threads[lane].site == site) lanes |= 1u << lane;
  }
  release(index, lanes);
  return true;
}

bool can_run(unsigned index) {
  return scheduler.simdgroups[index].ready ||
         (scheduler.simdgroups[index].waiting && release_one_branch(index));
}

int pick_next() {
  const unsigned count = scheduler.group.simdgroups;
  const unsigned here = scheduler.current / simdgroup_size;
  unsigned found = count;
  if (scheduler.launch->order == order_random) {
    const unsigned start = next_random() % count;
    for (unsigned i = 0; i < count && found == count; ++i)
      if (can_run((start + i) % count)) found = (start + i) % count;
  } else if (can_run(here)) {
    found = here;
  } else {
    const bool reverse = scheduler.launch->order == order_reverse;
    for (unsigned i = 0; i < count && found == count; ++i) {
      const unsigned index = reverse ? count - 1 - i : i;
      if (can_run(index)) found = index;
    }
  }
  if (found == count) return nobody;
  return found * simdgroup_size + pick_lane(scheduler.simdgroups[found].ready);
}

void switch_to_next(void** save) {
  const int next = pick_next();
  if (next == nobody) {
    metal_cpu_switch(save, scheduler.main_stack_pointer);
  } else if (save != &scheduler.threads[next].stack_pointer) {
    scheduler.current = next;
    metal_cpu_switch(save, scheduler.threads[next].stack_pointer);
  }
}

/// Position of the running thread in its simdgroup.
Simdgroup& my_simdgroup() { return scheduler.simdgroups[scheduler.current / simdgroup_size]; }
uint32_t my_bit() { return 1u << scheduler.current % simdgroup_size; }

void wait_for_lanes(Wait wait, Fold fold, const void* in, void* out, unsigned flags, const void* site) {
  Thread& me = scheduler.threads[scheduler.current];
  me.wait = wait;
  me.fold = fold;
  me.in = in;
  me.out = out;
  me.mem_flags = flags;
  me.site = site;
  Simdgroup& simdgroup = my_simdgroup();
  if (simdgroup.waiting) {
    const Thread* lanes = scheduler.threads + scheduler.current / simdgroup_size * simdgroup_size;
    if (lanes[__builtin_ctz(simdgroup.waiting)].site != site) simdgroup.mixed = true;
  }
  simdgroup.ready &= ~my_bit();
  simdgroup.waiting |= my_bit();
  if (simdgroup.waiting == simdgroup.live && !simdgroup.mixed) {
    release(scheduler.current / simdgroup_size, simdgroup.live);
    if (scheduler.launch->order != order_random) return;
  }
  switch_to_next(&me.stack_pointer);
}

void release_threadgroup_barrier(unsigned mem_flags) {
  Threadgroup& group = scheduler.group;
  for (unsigned i = 0; i < group.simdgroups; ++i) {
    lanes_synchronized(i, scheduler.simdgroups[i].live);
    scheduler.simdgroups[i].ready = scheduler.simdgroups[i].live;
  }
  group.at_barrier = 0;
  scheduler.counters->barriers++;
  threadgroup_barrier_passed(mem_flags);
}

void finish_thread() {
  Simdgroup& simdgroup = my_simdgroup();
  scheduler.threads[scheduler.current].wait = Wait::none;
  simdgroup.live &= ~my_bit();
  simdgroup.ready &= ~my_bit();
  scheduler.group.finished++;
  // The remaining lanes may have waited only for this one.
  if (simdgroup.waiting && simdgroup.waiting == simdgroup.live && !simdgroup.mixed)
    release(scheduler.current / simdgroup_size, simdgroup.live);
}

Position position_of(unsigned thread) {
  const Launch& launch = *scheduler.launch;
  const Threadgroup& group = scheduler.group;
  Position p{};
  const unsigned whole = launch.threadgroup[0] * launch.threadgroup[1] * launch.threadgroup[2];
  p.dispatch_quadgroups_per_threadgroup = (whole + 3) / 4;
  p.dispatch_simdgroups_per_threadgroup = (whole + simdgroup_size - 1) / simdgroup_size;
  p.quadgroup_index_in_threadgroup = thread / 4;
  p.quadgroups_per_threadgroup = (group.threads + 3) / 4;
  p.simdgroup_index_in_threadgroup = thread / simdgroup_size;
  p.simdgroups_per_threadgroup = group.simdgroups;
  p.thread_execution_width = simdgroup_size;
  p.threads_per_simdgroup = simdgroup_size;
  p.thread_index_in_quadgroup = thread % 4;
  p.thread_index_in_simdgroup = thread % simdgroup_size;
  p.thread_index_in_threadgroup = thread;
  const unsigned local[3] = {thread % group.size[0], thread / group.size[0] % group.size[1],
                             thread / (group.size[0] * group.size[1])};
  for (int axis = 0; axis < 3; ++axis) {
    p.dispatch_threads_per_threadgroup[axis] = launch.threadgroup[axis];
    p.grid_size[axis] = p.threads_per_grid[axis] = launch.grid[axis];
    p.thread_position_in_threadgroup[axis] = local[axis];
    p.threadgroup_position_in_grid[axis] = group.position[axis];
    p.thread_position_in_grid[axis] = group.position[axis] * launch.threadgroup[axis] + local[axis];
    p.threadgroups_per_grid[axis] =
        (launch.grid[axis] + launch.threadgroup[axis] - 1) / launch.threadgroup[axis];
    p.threads_per_threadgroup[axis] = group.size[axis];
  }
  return p;
}

void thread_main() {
  const Position position = position_of(scheduler.current);
  scheduler.launch->entry(bound_buffers, position);
  finish_thread();
  void* never;
  switch_to_next(&never);
  __builtin_unreachable();
}

const char* describe(Wait wait) {
  switch (wait) {
    case Wait::none: return "returned from the kernel";
    case Wait::collective: return "in a simdgroup function";
    case Wait::simdgroup_barrier: return "at simdgroup_barrier";
    case Wait::threadgroup_barrier: return "at threadgroup_barrier";
  }
  return "";
}

/// Handles a deadlock: no thread can run, but not all have returned.
void report_divergence() {
  const Threadgroup& group = scheduler.group;
  Violation& violation = *scheduler.violation;
  snprintf(violation.kind, sizeof violation.kind, "divergence");
  char* text = violation.text;
  char* const end = text + sizeof violation.text;
  text += snprintf(text, end - text, "threads of threadgroup (%u, %u, %u) wait for each other for ever:",
                   group.position[0], group.position[1], group.position[2]);
  auto same_place = [](const Thread& a, const Thread& b) {
    return a.wait == b.wait && (a.wait == Wait::none || a.site == b.site);
  };
  for (unsigned i = 0, places = 0; i < group.threads && end - text > 120; ++i) {
    const Thread& thread = scheduler.threads[i];
    bool seen = false;
    for (unsigned k = 0; k < i && !seen; ++k) seen = same_place(scheduler.threads[k], thread);
    if (seen) continue;
    unsigned count = 0;
    for (unsigned k = i; k < group.threads; ++k) count += same_place(scheduler.threads[k], thread);
    text += snprintf(text, end - text, "%s %u %s", places++ ? ";" : "", count, describe(thread.wait));
    if (thread.wait != Wait::none) text += snprintf(text, end - text, " {site:%p}", thread.site);
  }
}

void run_threadgroup(uint64_t index, const unsigned* position) {
  const Launch& launch = *scheduler.launch;
  Threadgroup& group = scheduler.group;
  group = {};
  group.index = index;
  for (int axis = 0; axis < 3; ++axis) {
    const unsigned start = position[axis] * launch.threadgroup[axis];
    const unsigned left = launch.grid[axis] - start;
    group.position[axis] = position[axis];
    group.size[axis] = left < launch.threadgroup[axis] ? left : launch.threadgroup[axis];
  }
  group.threads = group.size[0] * group.size[1] * group.size[2];
  group.simdgroups = (group.threads + simdgroup_size - 1) / simdgroup_size;
  for (unsigned i = 0; i < group.simdgroups; ++i) {
    const unsigned lanes = group.threads - i * simdgroup_size;
    const uint32_t mask = lanes >= simdgroup_size ? ~0u : (1u << lanes) - 1;
    scheduler.simdgroups[i] = {mask, mask, 0, false};
  }
  for (unsigned i = 0; i < group.threads; ++i) {
    scheduler.threads[i].wait = Wait::none;
    scheduler.threads[i].stack_pointer = new_fiber(stack_top(i), thread_main);
  }
  poison_arena();
  threadgroup_begins();
  scheduler.current = launch.order == order_reverse ? group.threads - 1 : 0;
  switch_to_next(&scheduler.main_stack_pointer);
  if (scheduler.violation->kind[0]) return;
  if (group.finished != group.threads) report_divergence();
  threadgroup_ends();
}

}  // namespace

void give_up(const char* kind, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  snprintf(scheduler.violation->kind, sizeof scheduler.violation->kind, "%s", kind);
  vsnprintf(scheduler.violation->text, sizeof scheduler.violation->text, format, arguments);
  va_end(arguments);
  // Kernel code owns nothing that needs a destructor, so its frames are simply dropped.
  void* never;
  metal_cpu_switch(&never, scheduler.main_stack_pointer);
  __builtin_unreachable();
}

}  // namespace metal_cpu

using namespace metal_cpu;

extern "C" {

unsigned metal_cpu_lane() { return scheduler.current % simdgroup_size; }

void metal_cpu_collective(Fold fold, const void* in, void* out) {
  wait_for_lanes(Wait::collective, fold, in, out, 0, __builtin_return_address(0));
}

void metal_cpu_simdgroup_barrier(unsigned mem_flags) {
  wait_for_lanes(Wait::simdgroup_barrier, nullptr, nullptr, nullptr, mem_flags,
                 __builtin_return_address(0));
}

void metal_cpu_threadgroup_barrier(unsigned mem_flags) {
  const void* site = __builtin_return_address(0);
  Threadgroup& group = scheduler.group;
  Thread& me = scheduler.threads[scheduler.current];
  me.wait = Wait::threadgroup_barrier;
  me.site = site;
  if (group.at_barrier == 0) {
    group.barrier_site = site;
    group.mixed = false;
  } else if (group.barrier_site != site) {
    group.mixed = true;
  }
  my_simdgroup().ready &= ~my_bit();
  if (++group.at_barrier == group.threads && !group.mixed) {
    release_threadgroup_barrier(mem_flags);
    if (scheduler.launch->order != order_random) return;
  }
  switch_to_next(&me.stack_pointer);
}

void metal_cpu_run(const Launch* launch, Counters* counters, Violation* violation) {
  scheduler.launch = launch;
  scheduler.counters = counters;
  scheduler.violation = violation;
  scheduler.random = launch->seed * 0x9E3779B97F4A7C15ULL + 0x1234567;
  clear_arena();
  dispatch_begins();
  for (unsigned i = 0; i < launch->num_buffers; ++i) bound_buffers[i] = placed(i);
  unsigned counts[3];
  for (int axis = 0; axis < 3; ++axis)
    counts[axis] = (launch->grid[axis] + launch->threadgroup[axis] - 1) / launch->threadgroup[axis];
  const uint64_t total = uint64_t(counts[0]) * counts[1] * counts[2];
  counters->threadgroups = total;
  // A random order of threadgroups: i -> i * step + start modulo total is a permutation as step and
  // total share no factor.
  uint64_t step = 1, start = 0;
  if (launch->order == order_random && total > 1 && total < uint64_t(1) << 32) {
    start = next_random() % total;
    auto shared_factor = [](uint64_t a, uint64_t b) {
      while (b) { const uint64_t r = a % b; a = b; b = r; }
      return a > 1;
    };
    do step = 1 + next_random() % (total - 1); while (shared_factor(total, step));
  }
  for (uint64_t i = 0; i < total && !violation->kind[0]; ++i) {
    uint64_t index = launch->order == order_reverse ? total - 1 - i : i;
    if (launch->order == order_random)
      index = (i * step + start) % total;
    const unsigned position[3] = {unsigned(index % counts[0]), unsigned(index / counts[0] % counts[1]),
                                  unsigned(index / (uint64_t(counts[0]) * counts[1]))};
    run_threadgroup(index, position);
  }
  dispatch_ends();
}
}
