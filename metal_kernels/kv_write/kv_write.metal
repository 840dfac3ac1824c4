// SPDX-License-Identifier: Apache-2.0
// Writes keys and values through the pools given as inputs; one simdgroup per batch row and K/V head.
// A slot counts across blocks, so that to a write the pool is [Hkv, slots, head size].

// Neighbouring elements of a lane, which the compiler may move together. Nothing is assumed of their
// alignment: keys are often a slice of a larger array.
constant constexpr int RUN = 4;

// A lane's share of writing one row of SIZE elements.
template <typename T, typename C, int SIZE>
inline void write_row(
    const device T* source, device C* target, device bfloat16_t* scale, uint lane) {
  constexpr int RUNS = (SIZE + 32 * RUN - 1) / (32 * RUN);
  float row[RUNS][RUN];
  uint largest = 0;  // magnitude, as its bits: they order as the numbers do, NaN above all
#pragma clang loop unroll(full)
  for (int i = 0; i < RUNS; i++) {
    const int first = (i * 32 + static_cast<int>(lane)) * RUN;
#pragma clang loop unroll(full)
    for (int j = 0; j < RUN; j++) {
      const bool inside = first + (SIZE % RUN ? j : 0) < SIZE;
      row[i][j] = inside ? decode_element(source[first + j]) : 0.0f;
      largest = max(largest, as_type<uint>(row[i][j]) & 0x7fffffffu);
    }
  }

  float divisor = 1.0f;
  if (largest_code<C>() > 0.0f) {
    const bfloat16_t rounded =
        static_cast<bfloat16_t>(as_type<float>(simd_max(largest)) / largest_code<C>());
    if (lane == 0) {
      *scale = rounded;
    }
    divisor = static_cast<float>(rounded);  // what readers multiply by
    divisor = divisor > 0.0f ? divisor : 1.0f;  // a row of zeros, or one with a NaN
  }

#pragma clang loop unroll(full)
  for (int i = 0; i < RUNS; i++) {
    const int first = (i * 32 + static_cast<int>(lane)) * RUN;
#pragma clang loop unroll(full)
    for (int j = 0; j < RUN; j++) {
      if (first + (SIZE % RUN ? j : 0) < SIZE) {
        target[first + j] = encode_element<C>(row[i][j] / divisor);
      }
    }
  }
}

// ---- kernel body
// Template: T, dtype of keys and values; C, dtype of the pools; KEY_SIZE, VALUE_SIZE, HAS_VALUES.
// Grid: (32, Hkv, rows).
const uint lane = thread_position_in_grid.x;
const uint head = thread_position_in_grid.y;
const uint row = thread_position_in_grid.z;
if (head == 0 && row == 0 && lane < 8) {
  token[lane] = 0;
}

const ulong num_slots = static_cast<ulong>(key_pool_shape[1]) * key_pool_shape[2];
const ulong slot = static_cast<ulong>(static_cast<long>(slot_mapping[row]));
if (slot < num_slots) {  // negative ones are huge here
  const ulong source = static_cast<ulong>(row) * key_pool_shape[0] + head;
  const ulong target = head * num_slots + slot;
  write_row<T, C, KEY_SIZE>(
      keys + source * KEY_SIZE,
      const_cast<device C*>(key_pool) + target * KEY_SIZE,
      const_cast<device bfloat16_t*>(key_scales) + target,
      lane);
  if (HAS_VALUES) {
    write_row<T, C, VALUE_SIZE>(
        values + source * VALUE_SIZE,
        const_cast<device C*>(value_pool) + target * VALUE_SIZE,
        const_cast<device bfloat16_t*>(value_scales) + target,
        lane);
  }
}
