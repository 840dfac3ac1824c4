// SPDX-License-Identifier: Apache-2.0
#include "traffic.h"

#include <stdlib.h>
#include <string.h>

#include "scheduler.h"
#include "shadow.h"

namespace metal_cpu {

namespace {

uint64_t mix(uint64_t x) {  // the finalizer of MurmurHash3: every input bit affects every output bit
  x ^= x >> 33;
  x *= 0xFF51AFD7ED558CCDULL;
  x ^= x >> 33;
  x *= 0xC4CEB9FE1A85EC53ULL;
  return x ^ x >> 33;
}

/// Hash table from a nonzero key to a count; cleared cheaply by starting a new generation.
class Table {
 public:
  uint32_t& at(uint64_t key, bool& added) {
    if (2 * (used_ + 1) > size_) grow();
    for (uint64_t i = mix(key) & (size_ - 1);; i = (i + 1) & (size_ - 1)) {
      Entry& entry = entries_[i];
      if (entry.generation != generation_) {
        entry = {key, generation_, 0};
        ++used_;
        added = true;
        return entry.count;
      }
      if (entry.key == key) {
        added = false;
        return entry.count;
      }
    }
  }
  void clear() {
    ++generation_;
    used_ = 0;
  }

 private:
  struct Entry {
    uint64_t key;
    uint32_t generation;
    uint32_t count;
  };
  void grow() {
    const uint64_t old_size = size_;
    Entry* old = entries_;
    size_ = size_ ? 2 * size_ : 256;
    entries_ = static_cast<Entry*>(calloc(size_, sizeof(Entry)));
    if (!entries_) abort();
    used_ = 0;
    for (uint64_t i = 0; i < old_size; ++i)
      if (old[i].generation == generation_) {
        bool added;
        at(old[i].key, added) = old[i].count;
      }
    free(old);
  }

  Entry* entries_ = nullptr;
  uint64_t size_ = 0, used_ = 0;
  uint32_t generation_ = 1;
};

/// Accesses of one simdgroup since its lanes last synchronized.
struct Seen {
  Table touched;      // (instruction, line)
  Table occurrences;  // (lane, site): number of executions
};
Seen seen[max_threads / simdgroup_size];
uint32_t meetings[max_threads];  // of each lane, so that synchronized lanes count from zero again

uint64_t lane_site(const void* site, bool write) {
  return mix(reinterpret_cast<uint64_t>(site) * 2 + write) + scheduler.current % simdgroup_size;
}

}  // namespace

void reset_traffic() {
  for (Seen& simdgroup : seen) {
    simdgroup.touched.clear();
    simdgroup.occurrences.clear();
  }
  memset(meetings, 0, sizeof meetings);
}

bool first_touch(const void* site, uint64_t line, bool write) {
  Seen& mine = seen[scheduler.current / simdgroup_size];
  bool added;
  const uint64_t time = meetings[scheduler.current];
  const uint64_t nth = mine.occurrences.at(lane_site(site, write) ^ mix(time), added);
  uint64_t key = mix(reinterpret_cast<uint64_t>(site) * 2 + write);
  key = mix(key + nth);
  key = mix(key + time);
  mine.touched.at(key ^ mix(line + 1), added);
  return added;
}

void next_occurrence(const void* site, bool write) {
  bool added;
  const uint64_t time = meetings[scheduler.current];
  seen[scheduler.current / simdgroup_size].occurrences.at(lane_site(site, write) ^ mix(time), added)++;
}

void lanes_meet(unsigned simdgroup, uint32_t mask, bool all) {
  for (uint32_t rest = mask; rest; rest &= rest - 1)
    meetings[simdgroup * simdgroup_size + __builtin_ctz(rest)]++;
  if (all) {
    seen[simdgroup].touched.clear();
    seen[simdgroup].occurrences.clear();
  }
}

}  // namespace metal_cpu
