// SPDX-License-Identifier: Apache-2.0
// Writes keys and values through the pools given as inputs; one simdgroup per batch row and K/V head.
// Slots are numbered across blocks, so a write sees the pool as [Hkv, slots, head size]. If keys arrive
// unrotated (Su et al. 2021, arXiv:2104.09864), this kernel rotates them, and queries too: one more
// simdgroup per batch row and query head.

// A lane's adjacent elements, which the compiler may load together. Assumes nothing about their
// alignment: keys are often a slice of a larger array.
constant constexpr int RUN = 4;

// A row of T; DIMS elements from FIRST on are rotated in pairs: neighbors if TRADITIONAL,
// else DIMS / 2 apart. DIMS = 0: no rotation. Same operations as MLX's own rotation (0.32.4), which this
// replaces, so that both give the same row.
template <typename T, int DIMS, int FIRST, bool TRADITIONAL, bool LISTED>
struct Row {
  const device T* elements;
  const device T* turned;  // elements from FIRST on
  const device float* frequencies;  // divisor of each pair's angle, if LISTED
  float position;  // of the row, scaled
  float base;  // log2 of the base of the frequencies

  float angle(int pair) const {
    if (LISTED) {
      return position * (1.0f / frequencies[pair]);
    }
    const float share = static_cast<float>(pair) / static_cast<float>(DIMS / 2);
    return position * metal::exp2(-share * base);
  }

  // Returns an element after rotation, rounded to T; `least` is the first of those loaded
  // together. Both of a pair are loaded unconditionally, so that no load waits for another.
  float at(int index, int least) const {
    if (DIMS == 0 || least + 32 * RUN <= FIRST) {
      return decode_element(elements[index]);
    }
    if (least >= FIRST + DIMS) {
      return decode_element(turned[index - FIRST]);
    }
    constexpr int HALF = DIMS / 2;
    const bool turns = index >= FIRST && index < FIRST + DIMS;
    const int place = turns ? index - FIRST : 0;
    const bool second = TRADITIONAL ? place % 2 != 0 : place >= HALF;
    const int apart = TRADITIONAL ? 1 : HALF;
    const device T* here = index < FIRST ? elements + index : turned + (index - FIRST);
    const float own = decode_element(*here);
    const float other = decode_element(*(turns ? here + (second ? -apart : apart) : here));
    const float turn = angle(TRADITIONAL ? place / 2 : place - (second ? HALF : 0));
    const float cosine = metal::fast::cos(turn);
    const float sine = metal::fast::sin(turn);
    const float now = second ? other * sine + own * cosine : own * cosine - other * sine;
    return turns ? decode_element(static_cast<T>(now)) : own;
  }
};

// Scale of a row whose largest magnitude is `largest`, quantized as `top`. Readers multiply by it.
inline bfloat16_t scale_for(float largest, float top) {
  return static_cast<bfloat16_t>(largest / top);
}

inline float divisor_for(bfloat16_t scale) {
  const float divisor = static_cast<float>(scale);
  return divisor > 0.0f ? divisor : 1.0f;  // a row of zeros, or one with a NaN
}

// Sum of squared errors of a row, in units of (largest / 2^14)^2: integer sums do not depend on the
// order. An error is at most a sixteenth of `largest`, so 4096 elements do not overflow.
template <typename C, int RUNS>
inline uint error_of(const thread float (&row)[RUNS][RUN], float largest, float divisor) {
  uint error = 0;
#pragma clang loop unroll(full)
  for (int i = 0; i < RUNS; i++) {
#pragma clang loop unroll(full)
    for (int j = 0; j < RUN; j++) {
      const float value = decode_element(encode_element<C>(row[i][j] / divisor)) * divisor;
      const float share = (row[i][j] - value) / largest * 16384.0f;
      error += static_cast<uint>(share * share);
    }
  }
  return metal::simd_sum(error);
}

// The scale with the least error among those that quantize the largest element as 448, 416, ... 256;
// for int8, with evenly spaced values, that of the largest value. A row of zeros, or with a NaN or
// an infinity, has no usable error, but the same values for every scale.
template <typename C, int RUNS>
inline bfloat16_t best_scale(const thread float (&row)[RUNS][RUN], float largest) {
  bfloat16_t best = scale_for(largest, largest_code<C>());
  uint least = 0xffffffffu;
  for (float top = largest_code<C>(); top >= 256.0f; top -= 32.0f) {
    const bfloat16_t scale = scale_for(largest, top);
    const uint error = error_of<C, RUNS>(row, largest, divisor_for(scale));
    if (error < least) {
      least = error;
      best = scale;
    }
  }
  return best;
}

// A lane's share of writing one row of SIZE elements.
template <int SIZE, typename R, typename C>
inline void write_row(
    const thread R& source, device C* target, device bfloat16_t* scale, uint lane) {
  constexpr int RUNS = (SIZE + 32 * RUN - 1) / (32 * RUN);
  float row[RUNS][RUN];
  uint largest = 0;  // bits of the magnitude, which sort like the numbers, NaN above all
#pragma clang loop unroll(full)
  for (int i = 0; i < RUNS; i++) {
    const int first = (i * 32 + static_cast<int>(lane)) * RUN;
#pragma clang loop unroll(full)
    for (int j = 0; j < RUN; j++) {
      const bool inside = first + (SIZE % RUN ? j : 0) < SIZE;
      row[i][j] = inside ? source.at(first + j, i * 32 * RUN) : 0.0f;
      largest = max(largest, as_type<uint>(row[i][j]) & 0x7fffffffu);
    }
  }

  float divisor = 1.0f;
  if (largest_code<C>() > 0.0f) {
    const bfloat16_t best = best_scale<C, RUNS>(row, as_type<float>(simd_max(largest)));
    if (lane == 0) {
      *scale = best;
    }
    divisor = divisor_for(best);
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
// Template: T, dtype of keys, values and queries; C, dtype of the pools; KEY_SIZE, VALUE_SIZE,
// HAS_VALUES; DIMS, FIRST, TRADITIONAL, LISTED of the rotation. If FIRST is not 0,
// keys end there, and tails hold the rest.
// Grid: (32, Hkv, plus H with queries, rows).
const uint lane = thread_position_in_grid.x;
const uint head = thread_position_in_grid.y;
const uint row = thread_position_in_grid.z;
if (head == 0 && row == 0 && lane < 8) {
  fence[lane] = 0;
}

using Turned = Row<T, DIMS, FIRST, TRADITIONAL, LISTED>;
using AsItIs = Row<T, 0, 0, false, false>;
const float position = angles[0] * static_cast<float>(positions[row]);
if (head >= static_cast<uint>(key_pool_shape[0])) {
  const ulong query_head = head - key_pool_shape[0];
  const ulong place = (static_cast<ulong>(row) * queries_shape[1] + query_head) * KEY_SIZE;
  const device T* query = queries + place;
  write_row<KEY_SIZE>(
      Turned{query, query + FIRST, frequencies, position, angles[1]},
      rotated + place,
      static_cast<device bfloat16_t*>(nullptr),
      lane);
  return;
}

const ulong num_slots = static_cast<ulong>(key_pool_shape[1]) * key_pool_shape[2];
const ulong slot = static_cast<ulong>(static_cast<long>(slot_mapping[row]));
if (slot < num_slots) {  // negative slots are huge here
  const ulong source = static_cast<ulong>(row) * key_pool_shape[0] + head;
  const ulong target = head * num_slots + slot;
  const device T* key = keys + source * (FIRST > 0 ? FIRST : KEY_SIZE);
  const device T* turned = FIRST > 0 ? tails + source * (KEY_SIZE - FIRST) : key;
  write_row<KEY_SIZE>(
      Turned{key, turned, frequencies, position, angles[1]},
      const_cast<device C*>(key_pool) + target * KEY_SIZE,
      const_cast<device bfloat16_t*>(key_scales) + target,
      lane);
  if (HAS_VALUES) {
    const device T* value = values + source * VALUE_SIZE;
    write_row<VALUE_SIZE>(
        AsItIs{value, value, frequencies, position, angles[1]},
        const_cast<device C*>(value_pool) + target * VALUE_SIZE,
        const_cast<device bfloat16_t*>(value_scales) + target,
        lane);
  }
}
