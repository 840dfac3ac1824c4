// SPDX-License-Identifier: Apache-2.0
// Check mode: the compiler calls these functions at every access to memory that could be shared.
#include <stdio.h>
#include <string.h>

#include "arena.h"
#include "fiber.h"
#include "hooks.h"
#include "regions.h"
#include "traffic.h"
#if defined(__APPLE__)
#include <dlfcn.h>
#else
#include <link.h>
#endif

namespace metal_cpu {

namespace {

Cell* arena_cells;
uintptr_t image_begin, image_end;  // the kernel library's constants

const char* verb(bool write) { return write ? "write" : "read"; }
bool writes(Access access) { return access == Access::write || access == Access::atomic_write; }

/// Formats a thread: "thread 3 of threadgroup (0, 1, 0)".
struct Who {
  char text[96];
  Who() {
    const Threadgroup& group = scheduler.group;
    snprintf(text, sizeof text, "thread %u of threadgroup (%u, %u, %u)", scheduler.current,
             group.position[0], group.position[1], group.position[2]);
  }
};

[[noreturn]] void report_race(
    const Race& race, const char* name, uint64_t element, Access access, const void* site) {
  const bool same = race.threadgroup == scheduler.group.index;
  give_up("race", "'%s' element %llu is %s by %s {site:%p} and was %s by thread %u of %s {site:%p}, "
          "with nothing to order the two", name, (unsigned long long)element,
          writes(access) ? "written" : "read", Who().text, site, race.earlier, race.thread,
          same ? "the same threadgroup" : "another threadgroup",
          reinterpret_cast<void*>(image_begin + race.site));
}

/// Returns the buffer at `offset` of a region, which several buffers may share.
unsigned buffer_at(const Region& region, uint64_t offset) {
  const char* original = region.original + offset;
  const Launch& launch = *scheduler.launch;
  for (unsigned i = 0; i < launch.num_buffers; ++i) {
    const char* data = static_cast<const char*>(launch.buffers[i].data);
    if (original >= data && original < data + launch.buffers[i].bytes) return i;
  }
  return 0;
}

void device_access(Region& region, char* address, uint64_t bytes, Access access, const void* site) {
  const uint64_t offset = uint64_t(address - region.base);
  const unsigned index = buffer_at(region, offset);
  const Buffer& buffer = scheduler.launch->buffers[index];
  const uint64_t start =
      uint64_t(static_cast<char*>(buffer.data) - region.original);  // offset of the buffer in the region
  const uint64_t element = (offset - start) / buffer.element_bytes;
  if (offset + bytes > region.bytes)
    give_up("out_of_bounds", "%s of %llu bytes at element %llu of '%s', which has %llu, by %s {site:%p}",
            verb(writes(access)), (unsigned long long)bytes, (unsigned long long)element, buffer.name,
            (unsigned long long)(buffer.bytes / buffer.element_bytes), Who().text, site);
  const bool must_be_written = !writes(access) && buffer.kind == kind_output && !buffer.initialized;
  const uint32_t code = uint32_t(uintptr_t(site) - image_begin);
  for (uint64_t at = offset / region.granule; at <= (offset + bytes - 1) / region.granule; ++at) {
    Cell& cell = region.cells[at];
    if (must_be_written && !cell.write_time)
      give_up("uninitialized", "element %llu of output '%s' is read by %s {site:%p} before anything "
              "was written there", (unsigned long long)((at * region.granule - start) / buffer.element_bytes),
              buffer.name, Who().text, site);
    const Race race = enter(cell, access, Memory::device, code);
    if (race.found)
      report_race(race, buffer.name, (at * region.granule - start) / buffer.element_bytes, access, site);
  }
  BufferTraffic& traffic = scheduler.counters->traffic[index];
  const bool write = writes(access);
  (write ? traffic.written_bytes : traffic.read_bytes) += bytes;
  for (uint64_t line = offset / line_bytes; line <= (offset + bytes - 1) / line_bytes; ++line) {
    const uint64_t id = uint64_t(region.base - static_cast<char*>(nullptr)) / line_bytes + line;
    if (first_touch(site, id, write)) (write ? traffic.lines_written : traffic.lines_read)++;
    if (!write && region.line_readers[line] != scheduler.group.index + 1) {
      region.line_readers[line] = uint32_t(scheduler.group.index + 1);
      traffic.unique_lines_read_by_threadgroup++;
    }
  }
  next_occurrence(site, write);
  if (write) mark_written(region, offset, bytes);
}

void threadgroup_access(char* address, uint64_t bytes, Access access, const void* site) {
  const ThreadgroupVariable* nearest = nullptr;
  for (unsigned i = 0; i < arena.count; ++i) {
    const ThreadgroupVariable& variable = arena.variables[i];
    if (variable.data && variable.data <= address && (!nearest || variable.data > nearest->data))
      nearest = &variable;
  }
  if (!nearest)
    give_up("out_of_bounds", "%s of %llu bytes before the first threadgroup variable, by %s {site:%p}",
            verb(writes(access)), (unsigned long long)bytes, Who().text, site);
  const uint64_t offset = uint64_t(address - nearest->data);
  const char* name = nearest->name;
  auto element = [&](uint64_t byte) { return (unsigned long long)(byte / nearest->element_bytes); };
  if (offset + bytes > nearest->bytes)
    give_up("out_of_bounds", "%s of %llu bytes at element %llu of threadgroup variable '%s', which has "
            "%llu, by %s {site:%p}", verb(writes(access)), (unsigned long long)bytes, element(offset),
            name, element(nearest->bytes), Who().text, site);
  const uint32_t code = uint32_t(uintptr_t(site) - image_begin);
  Cell* cells = arena_cells + (address - arena_region());
  for (uint64_t i = 0; i < bytes; ++i) {
    Cell& cell = cells[i];
    // Threadgroup memory is reset for every threadgroup.
    if (cell.write_time && cell.writer >> 11 != scheduler.group.index) cell = {};
    if (cell.read_time && cell.reader >> 12 != scheduler.group.index) cell = {};
    if (!writes(access) && !cell.write_time)
      give_up("uninitialized", "element %llu of threadgroup variable '%s' is read by %s {site:%p} "
              "before anything was written there", element(offset + i), name, Who().text, site);
    const Race race = enter(cell, access, Memory::threadgroup, code);
    if (race.found)
      report_race(race, name, element(offset + i), access, site);
  }
}

[[noreturn]] void report_wild(char* address, uint64_t bytes, Access access, const void* site) {
  for (unsigned i = 0; i < regions.count; ++i) {
    const Region& region = regions.all[i];
    if (address < region.mapping || address >= region.mapping + region.mapping_bytes) continue;
    const Buffer& buffer =
        scheduler.launch->buffers[buffer_at(region, address < region.base ? 0 : region.bytes - 1)];
    const int64_t offset = address - moved(buffer);
    give_up("out_of_bounds", "%s of %llu bytes at element %lld of '%s', which has %llu, by %s {site:%p}",
            verb(writes(access)), (unsigned long long)bytes,
            (long long)(offset < 0 ? (offset - int64_t(buffer.element_bytes) + 1) / int64_t(buffer.element_bytes)
                                   : offset / int64_t(buffer.element_bytes)),
            buffer.name, (unsigned long long)(buffer.bytes / buffer.element_bytes), Who().text, site);
  }
  give_up("out_of_bounds", "%s of %llu bytes at address %p, which no buffer is near, by %s {site:%p}",
          verb(writes(access)), (unsigned long long)bytes, address, Who().text, site);
}

void check(void* pointer, uint64_t bytes, Access access, const void* site) {
  char* address = static_cast<char*>(pointer);
  if (uint64_t(address - stack_region()) < stack_bytes * max_threads) return;  // private
  if (uint64_t(address - arena_region()) < arena_region_bytes())
    return threadgroup_access(address, bytes, access, site);
  static unsigned last;
  if (last < regions.count && uint64_t(address - regions.all[last].base) < regions.all[last].bytes)
    return device_access(regions.all[last], address, bytes, access, site);
  for (unsigned i = 0; i < regions.count; ++i)
    if (uint64_t(address - regions.all[i].base) < regions.all[i].bytes) {
      last = i;
      return device_access(regions.all[i], address, bytes, access, site);
    }
  const uintptr_t a = uintptr_t(address);
  if (!writes(access) && a >= image_begin && a < image_end) return;
  if (!writes(access) && address >= reinterpret_cast<char*>(bound_buffers) &&
      address < reinterpret_cast<char*>(bound_buffers + max_buffers))
    return;
  report_wild(address, bytes, access, site);
}

#if defined(__APPLE__)
void find_image() {
  Dl_info info;
  dladdr(reinterpret_cast<void*>(scheduler.launch->entry), &info);
  image_begin = uintptr_t(info.dli_fbase);
  image_end = image_begin + (64 << 20);  // larger than any kernel's library
}
#else
int find_segment(dl_phdr_info* info, size_t, void*) {
  uintptr_t begin = ~uintptr_t(0), end = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& segment = info->dlpi_phdr[i];
    if (segment.p_type != PT_LOAD) continue;
    const uintptr_t start = info->dlpi_addr + segment.p_vaddr;
    if (start < begin) begin = start;
    if (start + segment.p_memsz > end) end = start + segment.p_memsz;
  }
  const uintptr_t entry = uintptr_t(scheduler.launch->entry);
  if (entry < begin || entry >= end) return 0;
  image_begin = begin;
  image_end = end;
  return 1;
}
void find_image() { dl_iterate_phdr(find_segment, nullptr); }
#endif

}  // namespace

void dispatch_begins() {
  find_image();
  const uint64_t bytes = arena_region_bytes() * sizeof(Cell);
  if (arena_cells) unreserve(arena_cells, bytes);
  arena_cells = static_cast<Cell*>(reserve(bytes));
  move_in(*scheduler.launch);
}

void dispatch_ends() { move_out(!scheduler.violation->kind[0]); }

void threadgroup_begins() {
  reset_clock();
  reset_traffic();
}

void threadgroup_ends() {}
void threadgroup_barrier_passed(unsigned mem_flags) { order_threadgroup(mem_flags); }
void simdgroup_barrier_passed(unsigned index, unsigned mem_flags) { order_simdgroup(index, mem_flags); }
void lanes_synchronized(unsigned index, uint32_t mask) {
  lanes_meet(index, mask, mask == scheduler.simdgroups[index].live);
}
void* placed(unsigned index) { return moved(scheduler.launch->buffers[index]); }

}  // namespace metal_cpu

using metal_cpu::Access;
using metal_cpu::check;
#define SITE __builtin_return_address(0)

// The interface of clang's -fsanitize=thread.
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_atomic_thread_fence(int) {}

#define ACCESS(size)                                                                    \
  void __tsan_read##size(void* p) { check(p, size, Access::read, SITE); }               \
  void __tsan_write##size(void* p) { check(p, size, Access::write, SITE); }             \
  void __tsan_unaligned_read##size(void* p) { check(p, size, Access::read, SITE); }     \
  void __tsan_unaligned_write##size(void* p) { check(p, size, Access::write, SITE); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)

void __tsan_read_range(void* p, unsigned long n) { if (n) check(p, n, Access::read, SITE); }
void __tsan_write_range(void* p, unsigned long n) { if (n) check(p, n, Access::write, SITE); }
void* __tsan_memcpy(void* to, const void* from, unsigned long n) {
  if (n) {
    check(const_cast<void*>(from), n, Access::read, SITE);
    check(to, n, Access::write, SITE);
  }
  return memmove(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, unsigned long n) {
  return __tsan_memcpy(to, from, n);
}
void* __tsan_memset(void* to, int value, unsigned long n) {
  if (n) check(to, n, Access::write, SITE);
  return memset(to, value, n);
}

#define ATOMIC(bits)                                                                            \
  typedef uint##bits##_t word##bits;                                                            \
  word##bits __tsan_atomic##bits##_load(const volatile word##bits* p, int) {                    \
    check(const_cast<word##bits*>(p), bits / 8, Access::atomic_read, SITE);                     \
    return *p;                                                                                  \
  }                                                                                             \
  void __tsan_atomic##bits##_store(volatile word##bits* p, word##bits value, int) {             \
    check(const_cast<word##bits*>(p), bits / 8, Access::atomic_write, SITE);                    \
    *p = value;                                                                                 \
  }                                                                                             \
  word##bits __tsan_atomic##bits##_exchange(volatile word##bits* p, word##bits value, int) {    \
    check(const_cast<word##bits*>(p), bits / 8, Access::atomic_write, SITE);                    \
    const word##bits old = *p;                                                                  \
    *p = value;                                                                                 \
    return old;                                                                                 \
  }                                                                                             \
  word##bits __tsan_atomic##bits##_compare_exchange_val(                                        \
      volatile word##bits* p, word##bits expected, word##bits desired, int, int) {              \
    check(const_cast<word##bits*>(p), bits / 8, Access::atomic_write, SITE);                    \
    const word##bits old = *p;                                                                  \
    if (old == expected) *p = desired;                                                          \
    return old;                                                                                 \
  }
ATOMIC(8)
ATOMIC(16)
ATOMIC(32)
ATOMIC(64)
}
