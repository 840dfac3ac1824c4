// SPDX-License-Identifier: Apache-2.0
// Device memory in check mode: during a dispatch, every buffer is moved far from all others, so that
// a wrong index never lands in another buffer.
#pragma once

#include <stdint.h>

#include "dispatch.h"
#include "shadow.h"

namespace metal_cpu {

/// Bytes on both sides of a region. An index off by 2^32 two-byte elements stays in it.
constexpr uint64_t guard = uint64_t(16) << 30;
constexpr uint64_t line_bytes = 128;  // of Apple GPUs' caches
constexpr unsigned max_regions = 128;

/// A range of memory: one buffer, or several that overlap.
struct Region {
  char* original;
  uint64_t bytes;
  char* base;  // address during the dispatch
  char* mapping;
  uint64_t mapping_bytes;
  uint32_t granule;  // bytes per cell
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
/// Copies the kernel's writes back to the buffers, unless the dispatch was aborted.
void move_out(bool keep_writes);
char* moved(const Buffer& buffer);
void mark_written(Region& region, uint64_t offset, uint64_t bytes);

}  // namespace metal_cpu
