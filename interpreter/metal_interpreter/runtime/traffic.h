// SPDX-License-Identifier: Apache-2.0
// How many 128-byte lines a simdgroup's loads and stores touch.
#pragma once

#include <stdint.h>

namespace metal_cpu {

void reset_traffic();

/// Whether this access of the running thread is the first of its simdgroup's instruction to touch
/// `line`. Lanes run one after another here, so an instruction is: the same place in the code, for
/// the same time since the simdgroup last synchronized.
bool first_touch(const void* site, uint64_t line, bool write);

/// The running thread's next access at `site` belongs to another instruction.
void next_occurrence(const void* site, bool write);

void lanes_meet(unsigned simdgroup, uint32_t mask, bool all);

}  // namespace metal_cpu
