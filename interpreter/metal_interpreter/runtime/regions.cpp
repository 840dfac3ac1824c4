// SPDX-License-Identifier: Apache-2.0
#include "regions.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

namespace metal_cpu {

Regions regions;

namespace {

constexpr uint64_t page = 4096;  // for bookkeeping; the system's may be larger

bool all_zero(const char* bytes, uint64_t count) {
  uint8_t any = 0;
  for (uint64_t i = 0; i < count; ++i) any |= uint8_t(bytes[i]);
  return any == 0;
}

/// Copies only resident nonzero pages: a pool may be larger than the machine's memory, and
/// unwritten pages read as zero in both places.
void copy_resident(char* to, const char* from, uint64_t bytes) {
  const uint64_t system_page = uint64_t(sysconf(_SC_PAGESIZE));
  const uint64_t chunk_pages = 1024;
  unsigned char resident[1024];
  const char* const end = from + bytes;
  const char* at = from;
  while (at < end) {
    char* aligned = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(at) & ~(system_page - 1));
    uint64_t length = uint64_t(end - aligned);
    if (length > chunk_pages * system_page) length = chunk_pages * system_page;
#if defined(__APPLE__)
    const bool known = mincore(aligned, length, reinterpret_cast<char*>(resident)) == 0;
#else
    const bool known = mincore(aligned, length, resident) == 0;
#endif
    for (uint64_t i = 0; i * system_page < length; ++i) {
      const char* first = aligned + i * system_page;
      const char* last = first + system_page;
      if (first < at) first = at;
      if (last > end) last = end;
      const uint64_t length_here = uint64_t(last - first);
      if ((!known || resident[i] & 1) && !all_zero(first, length_here))
        memcpy(to + (first - from), first, length_here);
    }
    at = aligned + length;
  }
}

int by_address(const void* a, const void* b) {
  const char* x = static_cast<const Region*>(a)->original;
  const char* y = static_cast<const Region*>(b)->original;
  return x < y ? -1 : x > y;
}

/// Merges overlapping regions.
void merge() {
  qsort(regions.all, regions.count, sizeof(Region), by_address);
  unsigned kept = 0;
  for (unsigned i = 0; i < regions.count; ++i) {
    const Region next = regions.all[i];
    Region* last = kept ? &regions.all[kept - 1] : nullptr;
    if (!last || next.original >= last->original + last->bytes) {
      regions.all[kept++] = next;
      continue;
    }
    const uint64_t end = uint64_t(next.original - last->original) + next.bytes;
    if (end > last->bytes) last->bytes = end;
    if (next.granule < last->granule) last->granule = next.granule;
  }
  regions.count = kept;
}

void place(Region& region) {
  region.mapping_bytes = 2 * guard + region.bytes + page;
  void* mapping = mmap(nullptr, region.mapping_bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) {
    perror("the interpreter's check mode cannot reserve address space");
    abort();
  }
  region.mapping = static_cast<char*>(mapping);
  region.base = region.mapping + guard;
  constexpr uint64_t copied_whole = 1 << 20;
  if (region.bytes <= copied_whole)
    memcpy(region.base, region.original, region.bytes);
  else
    copy_resident(region.base, region.original, region.bytes);
  region.cells = static_cast<Cell*>(reserve((region.bytes / region.granule + 1) * sizeof(Cell)));
  region.line_readers = static_cast<uint32_t*>(reserve((region.bytes / line_bytes + 1) * 4));
  region.page_written = static_cast<uint8_t*>(reserve(region.bytes / page + 1));
  region.pages = nullptr;
  region.num_pages = region.max_pages = 0;
}

void write_back(Region& region) {
  const uint64_t granule = region.granule;
  for (uint64_t i = 0; i < region.num_pages; ++i) {
    uint64_t end = (region.pages[i] + 1) * page;
    if (end > region.bytes) end = region.bytes;
    for (uint64_t offset = region.pages[i] * page; offset < end; offset += granule)
      if (region.cells[offset / granule].write_time)
        memcpy(region.original + offset, region.base + offset,
               end - offset < granule ? end - offset : granule);
  }
}

}  // namespace

void move_in(const Launch& launch) {
  regions.count = 0;
  for (unsigned i = 0; i < launch.num_buffers; ++i) {
    const Buffer& buffer = launch.buffers[i];
    if (!buffer.bytes) continue;
    Region region{};
    region.original = static_cast<char*>(buffer.data);
    region.bytes = buffer.bytes;
    region.granule = buffer.element_bytes;
    regions.all[regions.count++] = region;
  }
  merge();
  for (unsigned i = 0; i < regions.count; ++i) place(regions.all[i]);
}

void move_out(bool keep_writes) {
  for (unsigned i = 0; i < regions.count; ++i) {
    Region& region = regions.all[i];
    if (keep_writes) write_back(region);
    unreserve(region.cells, (region.bytes / region.granule + 1) * sizeof(Cell));
    unreserve(region.line_readers, (region.bytes / line_bytes + 1) * 4);
    unreserve(region.page_written, region.bytes / page + 1);
    munmap(region.mapping, region.mapping_bytes);
    free(region.pages);
  }
  regions.count = 0;
}

char* moved(const Buffer& buffer) {
  char* data = static_cast<char*>(buffer.data);
  for (unsigned i = 0; i < regions.count; ++i) {
    const Region& region = regions.all[i];
    if (buffer.bytes && data >= region.original && data < region.original + region.bytes)
      return region.base + (data - region.original);
  }
  return nullptr;  // an empty buffer: every access to it is out of bounds
}

void mark_written(Region& region, uint64_t offset, uint64_t bytes) {
  for (uint64_t index = offset / page; index <= (offset + bytes - 1) / page; ++index) {
    if (region.page_written[index]) continue;
    region.page_written[index] = 1;
    if (region.num_pages == region.max_pages) {
      region.max_pages = region.max_pages ? 2 * region.max_pages : 64;
      region.pages =
          static_cast<uint64_t*>(realloc(region.pages, region.max_pages * sizeof(uint64_t)));
      if (!region.pages) abort();
    }
    region.pages[region.num_pages++] = index;
  }
}

}  // namespace metal_cpu
