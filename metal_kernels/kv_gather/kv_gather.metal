// SPDX-License-Identifier: Apache-2.0
// Decodes the blocks of each request one after the other; zeros outside of the request's slots.

// Element i of 16 bytes of a row, for two-byte elements.
template <typename C>
inline C element_of(uint4 raw, int i) {
  return as_type<metal::vec<C, 2>>(raw[i / 2])[i % 2];
}

template <>
inline float element_of<float>(uint4 raw, int i) {
  return as_type<float>(raw[i]);
}

template <>
inline uint8_t element_of<uint8_t>(uint4 raw, int i) {
  return static_cast<uint8_t>(raw[i / 4] >> (i % 4 * 8));
}

template <>
inline int8_t element_of<int8_t>(uint4 raw, int i) {
  return static_cast<int8_t>(raw[i / 4] >> (i % 4 * 8));
}

// ---- kernel body
// Template: T, C, dtypes of context and pool; HEAD_SIZE; RUN, elements in 16 bytes of the pool, which a
// thread reads; SAME, whether T is C, so that bits are copied.
// Grid: (block_size * HEAD_SIZE / RUN, W, H * n) for H of the pool's heads, from heads[0] on.
const uint first = thread_position_in_grid.x * RUN;
const uint column = thread_position_in_grid.y;
const uint num_columns = threads_per_grid.y;
const uint num_requests = threads_per_grid.z / static_cast<uint>(heads[1]);
const uint head = heads[0] + thread_position_in_grid.z / num_requests;
const uint request = thread_position_in_grid.z % num_requests;
if (thread_position_in_grid.z == 0 && column == 0) {
  for (uint i = thread_position_in_grid.x; i < 8; i += threads_per_grid.x) {
    fence[i] = 0;
  }
}

const uint num_blocks = pool_shape[1];
const uint block_size = pool_shape[2];
const uint block = static_cast<uint>(block_table[request * num_columns + column]);
const uint offset = first / HEAD_SIZE;
const int slot = column * block_size + offset;  // in the request's context
const bool held = slot >= bounds[request * 2] && slot < bounds[request * 2 + 1];
uint4 raw = uint4(0);
float scale = 0.0f;
if (held && block < num_blocks) {  // a negative block is huge here
  const ulong first_slot = (static_cast<ulong>(head) * num_blocks + block) * block_size;
  raw = *reinterpret_cast<const device uint4*>(pool + first_slot * HEAD_SIZE + first);
  scale = largest_code<C>() > 0.0f ? static_cast<float>(scales[first_slot + offset]) : 1.0f;
}
const ulong place = static_cast<ulong>(thread_position_in_grid.z) * num_columns + column;
device T* target = context + place * block_size * HEAD_SIZE + first;
if (SAME) {
  *reinterpret_cast<device uint4*>(target) = raw;
} else {
  for (int i = 0; i < RUN; i += 4) {
    metal::vec<T, 4> values;
    for (int j = 0; j < 4; j++) {
      values[j] = static_cast<T>(decode_element(element_of<C>(raw, i + j)) * scale);
    }
    *reinterpret_cast<device metal::vec<T, 4>*>(target + i) = values;
  }
}
