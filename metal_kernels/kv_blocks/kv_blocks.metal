// SPDX-License-Identifier: Apache-2.0
// Copies or clears blocks of a pool given as an input, for all heads.

// ---- kernel body
// Template: T, dtype of the pool; SIZE, elements of a block in one head; RUN, elements per thread,
// a divisor of SIZE; COPY, or clear. Grid: (SIZE / RUN, blocks, Hkv).
const uint first = thread_position_in_grid.x * RUN;
const uint pair = thread_position_in_grid.y;
const uint head = thread_position_in_grid.z;
if (head == 0 && pair == 0) {
  for (uint i = thread_position_in_grid.x; i < 8; i += threads_per_grid.x) {
    fence[i] = 0;
  }
}

const ulong head_start = static_cast<ulong>(head) * pool_shape[1];
T run[RUN];
const device T* source = pool + (head_start + sources[pair]) * SIZE + first;
for (int i = 0; i < RUN; i++) {
  run[i] = COPY ? source[i] : static_cast<T>(0);
}
device T* target = const_cast<device T*>(pool) + (head_start + targets[pair]) * SIZE + first;
for (int i = 0; i < RUN; i++) {
  target[i] = run[i];
}
