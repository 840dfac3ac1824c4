// SPDX-License-Identifier: Apache-2.0
// Device memory in check mode: every buffer is moved to a place of its own, far from all others,
// for the time of a dispatch, so that a wrong index can never land in another buffer.
#pragma once

#include <stdint.h>

#include "dispatch.h"
#include "shadow.h"

namespace metal_cpu {

/// Bytes on both sides of a region. An index that is wrong by 2^32 two-byte elements stays in it.
constexpr uint64_t guard = uint64_t(16) << 30;
constexpr uint64_t line_bytes = 128;  // of Apple GPUs' caches
constexpr unsigned max_regions = 128;

/// One stretch of memory: a buffer, or several that overlap.
struct Region {
  char* original;
  uint64_t bytes;
  char* base;  // where it is during the dispatch
  char* mapping;
  uint64_t mapping_bytes;
  uint32_t granule;  // bytes for each cell
  Cell* cells;
  uint32_t* line_readers;  // last threadgroup to read each line, plus one
  uint8_t* page_written;
  uint64_t* pages;  // indices of the written pages
  uint64_t num_pages, max_pages;
};

struct Regions {
  Region all[max_regions];
  unsigned count;
};
extern Regions regions;

void move_in(const Launch& launch);
/// Brings what the kernel wrote back to the buffers, unless the dispatch was given up.
void move_out(bool keep_writes);
char* moved(const Buffer& buffer);
void mark_written(Region& region, uint64_t offset, uint64_t bytes);

}  // namespace metal_cpu
