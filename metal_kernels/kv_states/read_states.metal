// SPDX-License-Identifier: Apache-2.0
// Reads states from blocks. A state's bits fill a block's K, head by head, and continue in its V.

// ---- kernel body
// Template: T, U, dtype of the pools and the unsigned dtype of its size; KEYS, VALUES, elements of a block
// in one head of each; NUM_HEADS; SPLIT, parts of a block; WIDTH, elements of a state; RUN, adjacent elements
// per thread, dividing the three. Grid: (WIDTH / RUN, states).
const uint first = thread_position_in_grid.x * RUN;
const uint state = thread_position_in_grid.y;
if (state == 0) {
  for (uint i = thread_position_in_grid.x; i < 8; i += threads_per_grid.x) {
    fence[i] = 0;
  }
}

const ulong block = blocks[state];
const ulong num_blocks = key_pool_shape[1] / SPLIT;
const bool in_keys = first < KEYS * NUM_HEADS;
const uint size = in_keys ? KEYS : VALUES;
const uint from = in_keys ? first : first - KEYS * NUM_HEADS;
const ulong start = (from / size * num_blocks + block) * size + from % size;
const device T* source = (in_keys ? key_pool : value_pool) + start;
device U* target = states + static_cast<ulong>(state) * WIDTH + first;
for (int i = 0; i < RUN; i++) {
  target[i] = as_type<U>(source[i]);
}
