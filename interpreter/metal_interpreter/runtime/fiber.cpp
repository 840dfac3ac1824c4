// SPDX-License-Identifier: Apache-2.0
#include "fiber.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "abi.h"

#if defined(__APPLE__)
#define SYMBOL "_metal_cpu_switch"
#else
#define SYMBOL "metal_cpu_switch"
#endif

// swapcontext makes two system calls per switch; a simdgroup function needs 32 switches.
#if defined(__x86_64__)
// System V: rbx, rbp, r12-r15 belong to the caller.
asm(".text\n.globl " SYMBOL "\n" SYMBOL ":\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n  ret\n");
constexpr int saved_words = 6;
constexpr int return_word = 6;
constexpr int frame_words = 8;  // after `ret` the stack is 8 off a multiple of 16, as in any callee
#elif defined(__aarch64__)
// AAPCS64: x19-x29, the link register and d8-d15 belong to the caller.
asm(".text\n.globl " SYMBOL "\n" SYMBOL ":\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n"
    "  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n"
    "  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n  ret\n");
constexpr int saved_words = 20;
constexpr int return_word = 11;
constexpr int frame_words = 20;
#else
#error "the interpreter's fibers know x86-64 and aarch64"
#endif

namespace metal_cpu {

void* new_fiber(char* top, void (*start)()) {
  void** frame = reinterpret_cast<void**>(top) - frame_words;
  for (int word = 0; word < saved_words; ++word) frame[word] = nullptr;
  frame[return_word] = reinterpret_cast<void*>(start);
  return frame;
}

char* stack_region() {
  static char* const region = [] {
    void* memory = mmap(nullptr, stack_bytes * max_threads, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      perror("the interpreter cannot reserve its stacks");
      abort();
    }
    // The lowest page of each stack is inaccessible, so that an overflow cannot reach a neighbor.
    for (unsigned i = 0; i < max_threads; ++i)
      mprotect(static_cast<char*>(memory) + i * stack_bytes, 16 * 1024, PROT_NONE);
    return static_cast<char*>(memory);
  }();
  return region;
}

char* stack_top(unsigned index) {
  constexpr unsigned long spread = 16 * 1024, line = 64;
  const unsigned long offset = (index * 7 * line) % spread;
  return stack_region() + (index + 1) * stack_bytes - offset;
}

}  // namespace metal_cpu
