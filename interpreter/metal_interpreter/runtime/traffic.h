// SPDX-License-Identifier: Apache-2.0
// Counts the 128-byte lines that a simdgroup's loads and stores touch.
#pragma once

#include <stdint.h>

namespace metal_cpu {

void reset_traffic();

/// Returns whether this access of the running thread is the first of its simdgroup's instruction to touch
/// `line`. Lanes run one after another here, so accesses belong to one instruction if they have the
/// same place in the code and the same count since the simdgroup last synchronized.
bool first_touch(const void* site, uint64_t line, bool write);

/// Makes the running thread's next access at `site` belong to another instruction.
void next_occurrence(const void* site, bool write);

void lanes_meet(unsigned simdgroup, uint32_t mask, bool all);

}  // namespace metal_cpu
