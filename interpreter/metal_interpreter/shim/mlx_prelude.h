// SPDX-License-Identifier: Apache-2.0
// Names that MLX puts before every custom kernel (its metal/kernels/utils.h), as far as kernels use
// them.
#pragma once

#include "metal_stdlib"

typedef half float16_t;
typedef bfloat bfloat16_t;

#define METAL_FUNC inline
#define MLX_MTL_CONST static constant constexpr const
#define MLX_MTL_PRAGMA_UNROLL _Pragma("clang loop unroll(full)")
#define MLX_MTL_LOOP_UNROLL _Pragma("clang loop unroll(full)")

METAL_CPU_INLINE uint16_t bfloat16_to_uint16(const bfloat16_t x) { return as_type<uint16_t>(x); }
METAL_CPU_INLINE bfloat16_t uint16_to_bfloat16(const uint16_t x) { return as_type<bfloat16_t>(x); }

/// Largest and smallest value of a type; for floats infinite, or finite with `finite_`.
template <typename T>
struct Limits {
  static constexpr T max = numeric_limits<T>::max();
  static constexpr T min = numeric_limits<T>::min();
  static constexpr T finite_max = numeric_limits<T>::max();
  static constexpr T finite_min = numeric_limits<T>::min();
};
#define METAL_CPU_FLOAT_LIMITS(T)                                       \
  template <>                                                           \
  struct Limits<T> {                                                    \
    static constexpr T max = numeric_limits<T>::infinity();             \
    static constexpr T min = __builtin_bit_cast(                        \
        T, decltype(metal_cpu_bits(T()))(                               \
               __builtin_bit_cast(decltype(metal_cpu_bits(T())), max) | \
               decltype(metal_cpu_bits(T()))(1) << (sizeof(T) * 8 - 1))); \
    static constexpr T finite_max = numeric_limits<T>::max();           \
    static constexpr T finite_min = numeric_limits<T>::lowest();        \
  };
uint32_t metal_cpu_bits(float);
uint16_t metal_cpu_bits(half);
uint16_t metal_cpu_bits(bfloat);
METAL_CPU_FLOAT_LIMITS(float)
METAL_CPU_FLOAT_LIMITS(half)
METAL_CPU_FLOAT_LIMITS(bfloat)
#undef METAL_CPU_FLOAT_LIMITS

template <typename T, typename U>
METAL_CPU_INLINE T ceildiv(T n, U m) { return (n + m - 1) / m; }

/// MLX's own, not in Metal.
METAL_CPU_INLINE float log1p(float x) { return __builtin_log1pf(x); }
METAL_CPU_INLINE float expm1f(float x) { return __builtin_expm1f(x); }
METAL_CPU_INLINE float erf(float x) { return __builtin_erff(x); }
