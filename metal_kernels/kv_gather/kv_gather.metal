// SPDX-License-Identifier: Apache-2.0
// Lays out the blocks of each request one after the other, as values.

// ---- kernel body
// Template: T, C, dtypes of context and pool; HEAD_SIZE; RUN, neighbours of a thread, dividing HEAD_SIZE.
// Grid: (block_size * HEAD_SIZE / RUN, W, Hkv * n).
const uint first = thread_position_in_grid.x * RUN;
const uint column = thread_position_in_grid.y;
const uint num_columns = threads_per_grid.y;
const uint num_requests = threads_per_grid.z / pool_shape[0];
const uint head = thread_position_in_grid.z / num_requests;
const uint request = thread_position_in_grid.z % num_requests;
if (thread_position_in_grid.z == 0 && column == 0) {
  for (uint i = thread_position_in_grid.x; i < 8; i += threads_per_grid.x) {
    fence[i] = 0;
  }
}

const uint num_blocks = pool_shape[1];
const uint block_size = pool_shape[2];
const uint block = static_cast<uint>(block_table[request * num_columns + column]);
const bool inside = block < num_blocks;  // a negative one is huge here
const ulong first_slot = (static_cast<ulong>(head) * num_blocks + block) * block_size;
float scale = 1.0f;
if (inside && largest_code<C>() > 0.0f) {
  scale = static_cast<float>(scales[first_slot + first / HEAD_SIZE]);
}
const ulong place = static_cast<ulong>(thread_position_in_grid.z) * num_columns + column;
device T* target = context + place * block_size * HEAD_SIZE + first;
const device C* source = pool + first_slot * HEAD_SIZE + first;
for (int i = 0; i < RUN; i++) {
  target[i] = static_cast<T>(inside ? decode_element(source[i]) * scale : 0.0f);
}
