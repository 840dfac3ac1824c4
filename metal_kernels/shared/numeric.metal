// SPDX-License-Identifier: Apache-2.0
// Conversion of KV cache elements to and from floats.
//
// A cache holds half, bfloat16_t or float values, or quantized bytes with a bfloat16_t scale per row,
// where value = byte * scale: uint8_t for fp8 e4m3 in its finite form (1 sign, 4 exponent and 3 mantissa
// bits, bias 7, no infinities; Micikevicius et al. 2022, arXiv:2209.05433), int8_t for integers.

// Below every attention score, and finite: sums and differences of two scores stay finite or LOWEST.
constant float LOWEST = -3.0e38f;

inline float decode_element(float value) {
  return value;
}

inline float decode_element(half value) {
  return static_cast<float>(value);
}

inline float decode_element(bfloat16_t value) {
  return static_cast<float>(value);
}

inline float decode_element(int8_t code) {
  return static_cast<float>(code);
}

// Exponent and mantissa are a half's without low bits and with bias 7 instead of 15, also if subnormal.
// The two NaNs, which encode_element never produces, decode to +-480.
inline float decode_element(uint8_t code) {
  const uint wide = code;
  const ushort bits = static_cast<ushort>((wide & 0x80u) << 8 | (wide & 0x7fu) << 7);
  return static_cast<float>(as_type<half>(bits)) * 256.0f;
}

// The largest quantized value of a cache; 0 if it is not quantized.
template <typename C>
inline float largest_code() {
  return 0.0f;
}

template <>
inline float largest_code<uint8_t>() {
  return 448.0f;
}

template <>
inline float largest_code<int8_t>() {
  return 127.0f;
}

// Rounds to the nearest value of C, ties to even.
template <typename C>
inline C encode_element(float value) {
  return static_cast<C>(value);
}

// Saturates, also for NaN: a row with a NaN has a NaN scale.
template <>
inline uint8_t encode_element<uint8_t>(float value) {
  const uint bits = as_type<uint>(value);
  const uint sign = bits >> 24 & 0x80u;
  const uint magnitude = bits & 0x7fffffffu;
  if (magnitude >= as_type<uint>(448.0f)) {
    return static_cast<uint8_t>(sign | 0x7eu);
  }
  if (magnitude < as_type<uint>(0.015625f)) {  // 2^-6
    // Subnormal: a multiple of 2^-9, which is the spacing of floats from 2^14 on.
    const uint steps = as_type<uint>(as_type<float>(magnitude) + 16384.0f) - as_type<uint>(16384.0f);
    return static_cast<uint8_t>(sign | steps);
  }
  const uint odd = magnitude >> 20 & 1u;
  const uint rebiased = magnitude - (120u << 23);  // a float's bias is 127, this one's 7
  return static_cast<uint8_t>(sign | (rebiased + 0x7ffffu + odd) >> 20);
}

template <>
inline int8_t encode_element<int8_t>(float value) {
  return static_cast<int8_t>(clamp(rint(value), -127.0f, 127.0f));
}
